// Products of bfloat16 in the matrix units of a CPU (AMX): sixteen rows of weights by sixteen rows of x at a time.
//
// x lies in tiles: sixteen rows, of each the same pair of inputs, then the next pair; 32 inputs are 1 KiB.
#pragma once
#include "linear.h"

#if defined(__AMX_BF16__)
constexpr bool UNITS = true;
#else
constexpr bool UNITS = false;
#endif
constexpr int64_t TILE_INPUTS = 32;

INLINE int64_t tile_steps(int64_t depth) { return (depth + TILE_INPUTS - 1) / TILE_INPUTS; }
// Of a tile of x, which has fewer than sixteen rows if there are fewer.
INLINE int64_t tile_bytes(int64_t num_rows) { return 64 * (num_rows < LANES ? num_rows : LANES); }
// With room behind the last tile, which is written in whole registers.
INLINE int64_t tiled_bytes(int64_t num_rows, int64_t depth) {
    return (num_rows + LANES - 1) / LANES * tile_steps(depth) * tile_bytes(num_rows) + 64;
}

// Rows of bfloat16 as tiles of `bytes`.
void make_tiles(char *tiles, int64_t bytes, const char *x, int64_t x_stride, int64_t num_rows, int64_t depth);
// tw_linear of rows in tiles.
void multiply_in_units(const tw_linear_args &args, int64_t start, int64_t stop);
