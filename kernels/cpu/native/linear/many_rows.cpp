// Products of more than 32 rows in matrix units: blocks of 32 rows by 32 columns.
//
// A panel, weights of 32 columns and some inputs, is put into tiles that stay in the nearest cache, and multiplied with all rows at hand,
// whose inputs stay in the second-level cache. Sums are rounded and written while the next block is multiplied. With gates a block has
// sixteen columns of either matrix, and their product is written.
//
// A core of a Xeon with AMX and 2 MiB of second-level cache does 2.8 TFLOP/s with tiles of the nearest cache, 2.1 with those of the second
// level and 0.5 with those of the third.
#include "matrix_units.h"

#if defined(__AMX_BF16__)
namespace {

constexpr int64_t BLOCK = 2 * LANES, CELLS = BLOCK * BLOCK;
constexpr int64_t MAX_STEPS = 20;                         // of a panel that has all inputs: 40 KiB of weights
constexpr int64_t SOME_STEPS = 2 * UNIT_STEPS;            // of one that has not: whole blocks of every packed format
constexpr int64_t MAX_ROWS_BYTES = 1 << 20;               // of inputs at hand: half of the second-level cache
constexpr int64_t MAX_ROWS = 16 * BLOCK, MIN_ROWS = 256;  // of them; fewer rows would not repay filling a panel
constexpr int64_t MAX_COLUMNS = 32 * BLOCK;               // whose cells are kept while some inputs after others are at hand

// Weights in tiles: `columns` outputs from `first` on, up to 32 or with gates sixteen, and 32 inputs for each of `steps` from
// `step` on.
struct Panel {
    char *tiles;
    int64_t first, columns, step, steps;
};

// Cells of a block to be written: sums over all inputs.
struct Sums {
    const float *cells;
    int64_t rows, columns, token, first;

    // `halves`: the product of each half of a block.
    template <bool GATED>
    void write(const tw_linear_args *halves, int64_t count) {
        count = least(count, rows);
        if (count == 0) return;
        if constexpr (GATED)
            write_gated(halves, count);
        else
            write_sums<BLOCK>(*halves, cells, count, columns, token, first);
        cells += BLOCK * count, token += count, rows -= count;
    }

    void write_gated(const tw_linear_args *halves, int64_t count) const {
        const auto rounded = [&](const tw_linear_args &args, F32 sum) {
            return floats_of(shift_left(bf16_bits(args.bias ? sum + load_bias(args, first, columns) : sum), 16));
        };
        for (int64_t row = 0; row < count; row++) {
            const float *sums = cells + BLOCK * row;
            const F32 gate = rounded(halves[0], load(sums)), up = rounded(halves[1], load(sums + LANES));
            char *out = (char *)halves->out + 2 * ((token + row) * halves->num_outputs + first);
            store_rounded<BFloat16>(out, gated(gate, up, halves->up->gelu), columns);
        }
    }
};

INLINE void load_cells(const float *cells) {
    _tile_loadd(0, cells, 4 * BLOCK);
    _tile_loadd(1, cells + LANES, 4 * BLOCK);
    _tile_loadd(2, cells + LANES * BLOCK, 4 * BLOCK);
    _tile_loadd(3, cells + LANES * BLOCK + LANES, 4 * BLOCK);
}
INLINE void store_cells(float *cells) {
    _tile_stored(0, cells, 4 * BLOCK);
    _tile_stored(1, cells + LANES, 4 * BLOCK);
    _tile_stored(2, cells + LANES * BLOCK, 4 * BLOCK);
    _tile_stored(3, cells + LANES * BLOCK + LANES, 4 * BLOCK);
}

// Writes the tiles of a panel: of each step those of sixteen columns, then those of the next sixteen.
void fill_panel(const tw_linear_args *halves, const Panel &panel) {
    char *copies = (char *)thread_scratch(WIDENED_WEIGHTS, LANES * COPY_STRIDE / 4);
    const int64_t begin = TILE_INPUTS * panel.step, end = least(begin + TILE_INPUTS * panel.steps, halves->num_inputs);
    for (int half = 0; half < 2; half++) {
        const int64_t before = halves->up ? 0 : LANES * half, num_columns = least(LANES, panel.columns - before);
        char *target = panel.tiles + TILE_BYTES * half;
        for (int64_t at = begin; at < end && num_columns > 0; at += UNIT_INPUTS) {
            const int64_t inputs = least(UNIT_INPUTS, end - at);
            int64_t stride;
            const char *columns =
                columns_at(halves[half], panel.first + before, num_columns, at, inputs, copies, stride, [] {});
            for (int64_t step = 0; step < tile_steps(inputs); step++, target += 2 * TILE_BYTES)
                transpose((const float *)(columns + 64 * step), stride / 4, (float *)target, LANES);
        }
    }
}

// Adds the products of rows `token` to `end` with a panel to their cells, of which `num_kept` take turns from `kept` on; with the
// first inputs they start at zero. Writes `sums` meanwhile, and with the last inputs leaves those of the last block there.
template <bool GATED>
void multiply_panel(const tw_linear_args *halves, const Panel &panel, int64_t token, int64_t end, float *cells, int64_t kept,
                    int64_t num_kept, Sums &sums) {
    const tw_linear_args &args = *halves;
    const int64_t steps = tile_steps(args.num_inputs);
    const bool tiled = args.x_stride == TILED;
    // Bytes from row to row within a tile of x, and on the whole; from step to step.
    const int64_t stride = tiled ? 64 : args.x_stride;
    const int64_t row_bytes = tiled ? 64 * steps : args.x_stride, step_bytes = tiled ? TILE_BYTES : 64;
    for (; token < end; token += BLOCK, kept++) {
        // Tiles are whole blocks; of rows as they lie the last block repeats some of the block before.
        const int64_t row = tiled ? token : least(token, args.num_tokens - BLOCK);
        const char *x = (const char *)args.x + row_bytes * row + step_bytes * panel.step, *weights = panel.tiles;
        float *own = cells + CELLS * (kept % num_kept);
        if (panel.step)
            load_cells(own);
        else
            zero_cells();
        for (int64_t step = 0; step < panel.steps; step++, x += step_bytes, weights += 2 * TILE_BYTES) {
            // Streamed, x does not displace the weights from the nearest cache.
            _tile_loadd(4, weights, 64);
            _tile_stream_loadd(6, x, stride);
            _tile_dpbf16ps(0, 6, 4);
            _tile_loadd(5, weights + TILE_BYTES, 64);
            _tile_dpbf16ps(1, 6, 5);
            _tile_stream_loadd(7, x + LANES * row_bytes, stride);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
            sums.write<GATED>(halves, 2);
        }
        sums.write<GATED>(halves, BLOCK);
        store_cells(own);
        if (panel.step + panel.steps == steps)
            sums = {own, least(BLOCK, args.num_tokens - row), panel.columns, row, panel.first};
    }
}

template <bool GATED>
void multiply_blocks(const tw_linear_args &args, int64_t start, int64_t stop) {
    const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
    const int64_t steps = tile_steps(args.num_inputs), panel_steps = steps > MAX_STEPS ? SOME_STEPS : steps;
    // At hand are some rows, of these the inputs of some panels, and columns that are multiplied with them.
    const int64_t max_rows = most(MIN_ROWS, least(MAX_ROWS, MAX_ROWS_BYTES / (64 * steps)));
    const int64_t blocks = parts(args.num_tokens, BLOCK * parts(args.num_tokens, max_rows)), rows = BLOCK * blocks;
    const int64_t steps_at_hand = panel_steps * most(1, MAX_ROWS_BYTES / (64 * rows * panel_steps));
    const int64_t width = GATED ? LANES : BLOCK;  // outputs of a block
    const int64_t columns = steps_at_hand < steps ? least(MAX_COLUMNS, stop - start) : stop - start;
    const int64_t num_kept = panel_steps == steps ? 1 : steps_at_hand < steps ? blocks * parts(columns, width) : blocks;
    char *tiles = (char *)thread_scratch(WEIGHT_TILES, 2 * TILE_BYTES * panel_steps / 4 + CELLS * num_kept);
    float *cells = (float *)(tiles + 2 * TILE_BYTES * panel_steps);
    tw_linear_args halves[] = {args, args};
    if (const tw_up_args *up = args.up)
        halves[1].weight = up->weight, halves[1].bias = up->bias, halves[1].weight_stride = up->weight_stride,
        halves[1].weight_kind = up->weight_kind;
    Sums sums = {};
    set_tiles();
    for (int64_t token = 0; token < args.num_tokens; token += rows)
        for (int64_t column = start; column < stop; column += columns)
            for (int64_t begin = 0; begin < steps; begin += steps_at_hand)
                for (int64_t first = column; first < least(column + columns, stop); first += width)
                    for (int64_t step = begin; step < least(begin + steps_at_hand, steps); step += panel_steps) {
                        const Panel panel = {tiles, first, least(width, stop - first), step, least(panel_steps, steps - step)};
                        fill_panel(halves, panel);
                        multiply_panel<GATED>(halves, panel, token, least(token + rows, args.num_tokens), cells,
                                              (first - column) / width * blocks, num_kept, sums);
                    }
    sums.write<GATED>(halves, BLOCK);
    _tile_release();
}

}  // namespace

void multiply_many_rows(const tw_linear_args &args, int64_t start, int64_t stop) {
    args.up ? multiply_blocks<true>(args, start, stop) : multiply_blocks<false>(args, start, stop);
}
#endif
