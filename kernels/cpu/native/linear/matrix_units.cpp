// An output is one chain of pairs over the inputs, in their order, so its bits depend on its row of x and of weights only. Weights are
// read as they lie, or unpacked in scratch memory; with few rows some inputs are unpacked while those before are multiplied.
#include "matrix_units.h"

#if defined(__AMX_BF16__)
#include "../parallel.h"
#include "tiles.h"
#include "unpack.h"

namespace {

// Adds to the cells in tiles 0 to 3: x (ROWS tiles of `x_bytes`, `x_ahead` apart) @ COLS, 16 or 32, rows of weights^T.
template <int ROWS, int COLS>
INLINE void add_products(const char *x, int64_t x_bytes, int64_t x_ahead, const char *weights, int64_t stride, int64_t steps) {
    for (int64_t step = 0; step < steps; step++, x += x_bytes, weights += 64) {
        _tile_loadd(6, x, x_bytes / LANES);
        _tile_loadd(4, weights, stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLS > LANES) {
            _tile_loadd(5, weights + LANES * stride, stride);
            _tile_dpbf16ps(1, 5, 6);
        }
        if constexpr (ROWS > 1) {
            _tile_loadd(7, x + x_ahead, x_bytes / LANES);
            _tile_dpbf16ps(2, 4, 7);
            if constexpr (COLS > LANES) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

INLINE void zero_cells() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// sums (num_rows, PANEL) = the cells.
INLINE void take_cells(float *sums, int64_t num_rows) {
    if (num_rows == 1) {
        _tile_stored(0, sums, 4);
        _tile_stored(1, sums + LANES, 4);
        return;
    }
    alignas(64) float cells[4][LANES][LANES];
    _tile_stored(0, cells[0], 64);
    _tile_stored(1, cells[1], 64);
    if (num_rows > LANES) _tile_stored(2, cells[2], 64);
    if (num_rows > LANES) _tile_stored(3, cells[3], 64);
    for (int i = 0; i < (num_rows > LANES ? 4 : 2); i++)
        transpose(cells[i][0], LANES, sums + i / 2 * LANES * PANEL + i % 2 * LANES, PANEL);
}

// The most inputs of columns that are copied at a time for few rows: sixteen columns of twice as many stay in the nearest cache.
constexpr int64_t UNIT_INPUTS = 256, UNIT_STEPS = UNIT_INPUTS / TILE_INPUTS;

// Inputs of columns, unpacked or as they are, as rows of whole steps. Calls `between` after each column.
void copy_columns(char *copy, int64_t stride, const tw_linear_args &args, int64_t first, int64_t columns, int64_t begin,
                  int64_t inputs, auto between) {
    const char *row = (const char *)args.weight + args.weight_stride * first;
    if (is_packed(args.weight_kind))
        return with_packed(args.weight_kind, [&]<class Format>(Format) {
            row += begin / GROUP / Format::num_groups * Format::num_bytes;
            // Memory is asked for the next columns in the order in which they lie.
            const char *ahead = row + columns * (args.weight_stride + begin / GROUP / Format::num_groups * Format::num_bytes);
            for (int64_t at = 0; at < columns; at++, row += args.weight_stride) {
                unpack_groups<Format, true>(copy + stride * at, row, inputs / GROUP, ahead);
                ahead += inputs / GROUP / Format::num_groups * Format::num_bytes;
                between();
            }
        });
    for (int64_t at = 0; at < columns; at++, row += args.weight_stride) {
        memset(copy + stride * at + (2 * inputs & -64), 0, 64);
        memcpy(copy + stride * at, row + 2 * begin, 2 * inputs);
    }
}

}  // namespace

void make_tiles(char *tiles, int64_t bytes, const char *x, int64_t x_stride, int64_t num_rows, int64_t depth) {
    if (bytes == 64 && depth) {  // one row in all lies as it is
        memset(tiles + 64 * (tile_steps(depth) - 1), 0, 64);
        memcpy(tiles, x, 2 * depth);
        return;
    }
    for (int64_t row = 0; row < num_rows; row += LANES, x += LANES * x_stride)
        for (int64_t at = 0; at < depth; at += TILE_INPUTS, tiles += bytes) {
            alignas(64) char inputs[LANES][64] = {};
            for (int64_t i = 0; i < least(LANES, num_rows - row); i++)
                memcpy(inputs[i], x + x_stride * i + 2 * at, 2 * least(TILE_INPUTS, depth - at));
            transpose((const float *)inputs[0], LANES, (float *)tiles, bytes / 64);
        }
}

void multiply_in_units(const tw_linear_args &args, int64_t start, int64_t stop) {
    const int64_t depth = args.num_inputs, steps = tile_steps(depth), x_bytes = tile_bytes(args.num_tokens);
    alignas(64) uint8_t shapes[64] = {1};  // of tiles: bytes of a row from 16 on, rows from 48 on
    for (int tile = 0; tile < 8; tile++)
        shapes[16 + 2 * tile] = tile == 4 || tile == 5 ? 64 : x_bytes / LANES, shapes[48 + tile] = LANES;
    _tile_loadconfig(shapes);
    zero_cells();
    constexpr int64_t rows = 2 * LANES;
    const bool few = args.num_tokens <= rows;
    const int64_t width = few ? LANES : 2 * LANES;
    const int64_t num_units = few ? most(1, (depth + UNIT_INPUTS - 1) / UNIT_INPUTS) : 1;
    const int64_t unit_inputs = TILE_INPUTS * ((steps + num_units - 1) / num_units);
    const int64_t copy_stride = 64 * tile_steps(unit_inputs) + 64;
    char *copies = (char *)thread_scratch(WIDENED_WEIGHTS, 2 * width * copy_stride / 4);
    alignas(64) float sums[rows * PANEL];
    const auto take = [&](int64_t token, int64_t first) {
        const int64_t count = least(rows, args.num_tokens - token);
        take_cells(sums, count);
        zero_cells();
        write_sums(args, sums, count, least(width, stop - first), token, first);
    };
    struct {
        const char *x, *weights;
        int64_t stride, steps;
    } unit = {};  // is multiplied while the next is copied
    const auto add = [&](int64_t step) {
        if (step >= unit.steps) return;
        const char *x = unit.x + x_bytes * step, *weights = unit.weights + 64 * step;
        if (args.num_tokens > LANES)
            add_products<2, LANES>(x, x_bytes, x_bytes * steps, weights, unit.stride, 1);
        else
            add_products<1, LANES>(x, x_bytes, 0, weights, unit.stride, 1);
    };
    for (int64_t first = start, turn = 0; first < stop; first += width) {
        const int64_t columns = least(width, stop - first);
        const bool in_place = !is_packed(args.weight_kind) && columns == width && depth % TILE_INPUTS == 0;
        for (int64_t begin = 0; begin < depth; begin += unit_inputs) {
            const int64_t inputs = least(unit_inputs, depth - begin), stride = in_place ? args.weight_stride : copy_stride;
            char *own = in_place ? (char *)args.weight + stride * first + 2 * begin : copies + turn++ % 2 * width * stride;
            int64_t copied = 0;
            if (!in_place)
                copy_columns(own, stride, args, first, columns, begin, inputs, [&] {
                    if (copied++ % 2) add(copied / 2 - 1);
                });
            for (int64_t step = copied / 2; step < UNIT_STEPS; step++) add(step);
            const char *x = (const char *)args.x + x_bytes * (begin / TILE_INPUTS);
            if (few && begin == 0 && first > start) take(0, first - width);
            if (few) unit = {x, own, stride, tile_steps(inputs)};
            for (int64_t token = 0; !few && token < args.num_tokens; token += rows, x += 2 * x_bytes * steps) {
                if (args.num_tokens - token > LANES)
                    add_products<2, 32>(x, x_bytes, x_bytes * steps, own, stride, steps);
                else
                    add_products<1, 32>(x, x_bytes, 0, own, stride, steps);
                take(token, first);
            }
        }
    }
    for (int64_t step = 0; step < UNIT_STEPS; step++) add(step);
    if (few) take(0, start + (stop - start - 1) / width * width);
    _tile_release();
}
#endif
