// Products of up to 32 rows in matrix units. Weights are read once, as they lie, or unpacked in scratch memory: some inputs are unpacked
// while those before are multiplied.
#include "matrix_units.h"

#if defined(__AMX_BF16__)
namespace {

// Adds to the cells in tiles 0 and 2: sixteen rows of weights @ x^T (ROWS tiles of `x_bytes`, `x_ahead` apart), of one step.
template <int ROWS>
INLINE void add_products(const char *x, int64_t x_bytes, int64_t x_ahead, const char *weights, int64_t stride) {
    _tile_loadd(6, x, x_bytes / LANES);
    _tile_loadd(4, weights, stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (ROWS > 1) {
        _tile_loadd(7, x + x_ahead, x_bytes / LANES);
        _tile_dpbf16ps(2, 4, 7);
    }
}

// Writes the sums in the cells, of sixteen outputs from `first` on, and begins new ones.
void take_cells(const tw_linear_args &args, int64_t first, int64_t stop) {
    alignas(64) float cells[LANES][LANES], sums[FEW_ROWS * PANEL];
    if (args.num_tokens == 1) {
        _tile_stored(0, sums, 4);
    } else {
        _tile_stored(0, cells, 64);
        transpose(cells[0], LANES, sums, PANEL);
    }
    if (args.num_tokens > LANES) {
        _tile_stored(2, cells, 64);
        transpose(cells[0], LANES, sums + LANES * PANEL, PANEL);
    }
    zero_cells();
    write_sums(args, sums, args.num_tokens, least(LANES, stop - first), 0, first);
}

}  // namespace

void make_tiles(char *tiles, const char *x, int64_t x_stride, int64_t num_rows, int64_t all_rows, int64_t depth) {
    const int64_t bytes = tile_bytes(all_rows);
    if (all_rows == 1 && depth) {  // it lies as it is
        memset(tiles + 64 * (tile_steps(depth) - 1), 0, 64);
        memcpy(tiles, x, 2 * depth);
        return;
    }
    for (int64_t row = 0; row < num_rows; row += LANES, x += LANES * x_stride)
        for (int64_t at = 0; at < depth; at += TILE_INPUTS, tiles += bytes) {
            alignas(64) char rest[LANES][64];
            const char *inputs = x + 2 * at;
            int64_t stride = x_stride;
            if (num_rows - row < LANES || depth - at < TILE_INPUTS || x_stride % 4) {
                memset(rest, 0, sizeof rest);
                for (int i = 0; i < least(LANES, num_rows - row); i++)
                    memcpy(rest[i], inputs + stride * i, 2 * least(TILE_INPUTS, depth - at));
                inputs = rest[0], stride = 64;
            }
            if (all_rows <= FEW_ROWS)
                transpose((const float *)inputs, stride / 4, (float *)tiles, bytes / 64);
            else
                UNROLL_FOR (int i = 0; i < LANES; i++) memcpy(tiles + 64 * i, inputs + stride * i, 64);
        }
}

void multiply_few_rows(const tw_linear_args &args, int64_t start, int64_t stop) {
    const int64_t depth = args.num_inputs, steps = tile_steps(depth), x_bytes = tile_bytes(args.num_tokens);
    set_tiles(x_bytes / LANES);
    zero_cells();
    const int64_t num_units = (depth + UNIT_INPUTS - 1) / UNIT_INPUTS;
    const int64_t unit_inputs = TILE_INPUTS * ((steps + num_units - 1) / num_units);
    char *copies = (char *)thread_scratch(WIDENED_WEIGHTS, 2 * LANES * COPY_STRIDE / 4);
    struct {
        const char *x, *weights;
        int64_t stride, steps;
    } unit = {};  // is multiplied while the next is copied
    const auto add = [&](int64_t step) {
        if (step >= unit.steps) return;
        const char *x = unit.x + x_bytes * step, *weights = unit.weights + 64 * step;
        if (args.num_tokens > LANES)
            add_products<2>(x, x_bytes, x_bytes * steps, weights, unit.stride);
        else
            add_products<1>(x, x_bytes, 0, weights, unit.stride);
    };
    for (int64_t first = start, turn = 0; first < stop; first += LANES) {
        const int64_t columns = least(LANES, stop - first);
        for (int64_t begin = 0; begin < depth; begin += unit_inputs) {
            const int64_t inputs = least(unit_inputs, depth - begin);
            int64_t copied = 0, stride;
            const char *own =
                columns_at(args, first, columns, begin, inputs, copies + turn++ % 2 * LANES * COPY_STRIDE, stride, [&] {
                    if (copied++ % 2) add(copied / 2 - 1);
                });
            for (int64_t step = copied / 2; step < UNIT_STEPS; step++) add(step);
            if (begin == 0 && first > start) take_cells(args, first - LANES, stop);
            unit = {(const char *)args.x + x_bytes * (begin / TILE_INPUTS), own, stride, tile_steps(inputs)};
        }
    }
    for (int64_t step = 0; step < UNIT_STEPS; step++) add(step);
    take_cells(args, start + (stop - start - 1) / LANES * LANES, stop);
    _tile_release();
}
#endif
