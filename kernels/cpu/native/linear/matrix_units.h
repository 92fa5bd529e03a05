// Products of bfloat16 in the matrix units of a CPU (AMX), which multiply sixteen rows by sixteen.
//
// An output is one chain of pairs over the inputs, in their order, so its bits depend on its row of x and of weights only.
// The units want one factor as rows, and the other in tiles of pairs: sixteen rows, of each the same pair of inputs, then the next pair.
// With few rows x is in such tiles and weights are read as they lie, or unpacked, once. With many rows weights are put into
// such tiles, a few columns at a time, and sums need not be turned round.
#pragma once
#include "../parallel.h"
#include "linear.h"
#include "unpack.h"

#if defined(__AMX_BF16__)
constexpr bool UNITS = true;
#else
constexpr bool UNITS = false;
#endif
constexpr int64_t TILE_INPUTS = 32, TILE_BYTES = 1024, FEW_ROWS = 2 * LANES;
constexpr int64_t TILED = -1;  // tw_prepared_stride of tiles; rows that are all the same one are 0 apart

INLINE int64_t tile_steps(int64_t depth) { return (depth + TILE_INPUTS - 1) / TILE_INPUTS; }

// Whether rows of x are prepared as tiles; else they are read as they lie, which takes longer each time: many columns repay copying
// them to tiles of sixteen rows by 32 inputs.
INLINE bool in_tiles(const tw_rows_args &args) {
    return UNITS && args.kind == BFLOAT16 && !is_int8(args.weight_kind) &&
           (args.num_rows <= FEW_ROWS || args.num_outputs > args.num_inputs || args.num_inputs % TILE_INPUTS);
}
// Of a tile of x, which has fewer than sixteen rows if there are fewer.
INLINE int64_t tile_bytes(int64_t num_rows) { return 64 * least(num_rows, LANES); }
// Of whole pairs of tiles if there are many rows; with room behind the last tile, which is written in whole registers.
INLINE int64_t tiled_bytes(int64_t num_rows, int64_t depth) {
    const int64_t rows = num_rows > FEW_ROWS ? FEW_ROWS : LANES;
    return (num_rows + rows - 1) / rows * (rows / LANES) * tile_steps(depth) * tile_bytes(num_rows) + 64;
}

// Rows of bfloat16, which are `all_rows` with those before and behind, as tiles.
void make_tiles(char *tiles, const char *x, int64_t x_stride, int64_t num_rows, int64_t all_rows, int64_t depth);
// tw_linear of up to FEW_ROWS rows in tiles, and of more, in tiles or as they lie.
void multiply_few_rows(const tw_linear_args &args, int64_t start, int64_t stop);
void multiply_many_rows(const tw_linear_args &args, int64_t start, int64_t stop);

#if defined(__AMX_BF16__)
namespace {
// The most inputs of columns that are copied at a time: sixteen columns of twice as many stay in the nearest cache.
constexpr int64_t UNIT_INPUTS = 256, UNIT_STEPS = UNIT_INPUTS / TILE_INPUTS;
constexpr int64_t COPY_STRIDE = 64 * UNIT_STEPS + 64;  // rows of whole pages would compete for the same few places of the cache

// Sets every tile to sixteen rows, of 64 bytes in tiles 4 and 5 and of `x_bytes` in the others.
INLINE void set_tiles(int64_t x_bytes = 64) {
    alignas(64) uint8_t shapes[64] = {1};  // bytes of a row from 16 on, rows from 48 on
    for (int tile = 0; tile < 8; tile++)
        shapes[16 + 2 * tile] = tile == 4 || tile == 5 ? 64 : x_bytes, shapes[48 + tile] = LANES;
    _tile_loadconfig(shapes);
}
INLINE void zero_cells() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Up to UNIT_INPUTS inputs of up to sixteen columns as rows of whole steps: where they lie, or in `copies`, unpacked or as they
// are. Sets `stride`, the bytes between rows, a multiple of 4. Calls `between` after each column that is unpacked.
const char *columns_at(const tw_linear_args &args, int64_t first, int64_t columns, int64_t begin, int64_t inputs, char *copies,
                       int64_t &stride, auto between) {
    const char *row = (const char *)args.weight + args.weight_stride * first;
    stride = COPY_STRIDE;
    if (is_packed(args.weight_kind)) {
        with_packed(args.weight_kind, [&]<class Format>(Format) {
            row += begin / GROUP / Format::num_groups * Format::num_bytes;
            // Memory is asked for the next columns in the order in which they lie.
            const char *ahead = row + columns * (args.weight_stride + begin / GROUP / Format::num_groups * Format::num_bytes);
            for (int64_t at = 0; at < columns; at++, row += args.weight_stride) {
                unpack_groups<Format, true>(copies + stride * at, row, inputs / GROUP, ahead);
                ahead += inputs / GROUP / Format::num_groups * Format::num_bytes;
                between();
            }
        });
        return copies;
    }
    row += 2 * begin;
    if (columns == LANES && inputs % TILE_INPUTS == 0 && args.weight_stride % 4 == 0) {
        stride = args.weight_stride;
        return row;
    }
    for (int64_t at = 0; at < columns; at++, row += args.weight_stride) {
        memset(copies + stride * at + (2 * inputs & -64), 0, 64);
        memcpy(copies + stride * at, row, 2 * inputs);
    }
    return copies;
}
}  // namespace
#endif
