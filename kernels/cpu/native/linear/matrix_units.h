// Products of bfloat16 in the matrix units of a CPU (AMX): sixteen weights' rows by sixteen rows of x at a time.
//
// An output is one chain of pairs over the inputs, in their order, so its bits depend on its row of x and of weights only. The
// weights are read as they lie, or unpacked in scratch memory. x lies in tiles: sixteen rows, of each the same pair of inputs,
// then the next pair; 32 inputs are 1 KiB.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t TILE_INPUTS = 32;

INLINE int64_t tile_steps(int64_t depth) { return (depth + TILE_INPUTS - 1) / TILE_INPUTS; }
// Of a tile of x, which has fewer than sixteen rows if there are fewer.
INLINE int64_t tile_bytes(int64_t num_rows) { return 64 * (num_rows < LANES ? num_rows : LANES); }
// With room behind the last tile, which is written in whole registers.
INLINE int64_t tiled_bytes(int64_t num_rows, int64_t depth) {
    return (num_rows + LANES - 1) / LANES * tile_steps(depth) * tile_bytes(num_rows) + 64;
}

#if defined(__AMX_BF16__)
template <int HALF>
INLINE void transpose(FloatReg *rows) {
    UNROLL for (int row = 0; row < LANES; row++) {
        if (row & HALF) continue;
        const FloatReg low = rows[row], high = rows[row + HALF];
        rows[row] = Lanes<LANES>::low_halves<HALF>(low, high), rows[row + HALF] = Lanes<LANES>::high_halves<HALF>(low, high);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(rows);
}

// Sixteen rows of sixteen words, `stride` bytes apart, of which `count` exist, with rows as columns.
INLINE void transpose(char *target, int64_t target_stride, const char *source, int64_t stride, int64_t count) {
    FloatReg rows[LANES] = {};
    UNROLL for (int row = 0; row < LANES; row++)
        if (row < count) memcpy(&rows[row], source + stride * row, 4 * LANES);
    transpose<LANES / 2>(rows);
    UNROLL for (int row = 0; row < LANES; row++)
        memcpy(target + target_stride * row, &rows[row], 4 * LANES);
}

// Rows of bfloat16 as tiles of `bytes`.
void make_tiles(char *tiles, int64_t bytes, const char *x, int64_t x_stride, int64_t num_rows, int64_t depth) {
    for (int64_t row = 0; row < num_rows; row += LANES, x += LANES * x_stride) {
        const int64_t count = num_rows - row < LANES ? num_rows - row : LANES;
        for (int64_t at = 0; at < depth; at += TILE_INPUTS, tiles += bytes) {
            alignas(64) char rest[LANES][64] = {};
            const bool is_whole = at + TILE_INPUTS <= depth;
            if (!is_whole)
                for (int64_t i = 0; i < count; i++) memcpy(rest[i], x + x_stride * i + 2 * at, 2 * (depth - at));
            transpose(tiles, bytes / LANES, is_whole ? x + 2 * at : rest[0], is_whole ? x_stride : 64, count);
        }
    }
}

// Adds to the cells in tiles 0 to 3: x (ROWS tiles of `x_bytes`, `x_ahead` apart) @ 32 rows of weights^T.
template <int ROWS>
INLINE void add_products(const char *x, int64_t x_bytes, int64_t x_ahead, const char *weights, int64_t stride, int64_t steps) {
    for (int64_t step = 0; step < steps; step++, x += x_bytes, weights += 64) {
        _tile_loadd(6, x, x_bytes / LANES);
        _tile_loadd(4, weights, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + LANES * stride, stride);
        _tile_dpbf16ps(1, 5, 6);
        if constexpr (ROWS == 2) {
            _tile_loadd(7, x + x_ahead, x_bytes / LANES);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
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
    alignas(64) float cells[4][LANES][LANES];
    _tile_stored(0, cells[0], 64);
    _tile_stored(1, cells[1], 64);
    if (num_rows > LANES) _tile_stored(2, cells[2], 64);
    if (num_rows > LANES) _tile_stored(3, cells[3], 64);
    if (num_rows == 1)
        for (int at = 0; at < 2 * LANES; at++) sums[at] = cells[at / LANES][at % LANES][0];
    else
        for (int i = 0; i < (num_rows > LANES ? 4 : 2); i++)
            transpose((char *)(sums + i / 2 * LANES * PANEL + i % 2 * LANES), 4 * PANEL, (const char *)cells[i], 64, LANES);
}

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, zeros[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#endif
}  // namespace
