// Products of small matrices: queries with keys, and probabilities with values.
#pragma once
#include "../kernels.h"
#include "../numbers.h"

namespace {
// c = a @ b or c = c * factor of the row + a @ b. Strides are in floats. In pairs each float of a and b is two bfloat16 numbers.
struct Product {
    float *c;
    const float *a, *b;
    int64_t c_stride, a_stride, b_stride, num_rows, depth;
    const float *factors;
};

template <bool IN_PAIRS>
INLINE F32 add_product(F32 a, F32 b, F32 sum) {
#if defined(__AVX512BF16__)
    if constexpr (IN_PAIRS) {
        sum.reg[0] = (FloatReg)_mm512_dpbf16_ps((__m512)sum.reg[0], (__m512bh)a.reg[0], (__m512bh)b.reg[0]);
        return sum;
    }
#endif
    return fma(a, b, sum);
}

// A tile of c, whose sums stay in registers. Each is one chain of multiply-adds in order of depth, whatever the shape.
template <int ROWS, int VECTORS, bool ACCUMULATE, bool IN_PAIRS>
void multiply_tile(const Product &product, int64_t first_row, int64_t first_column) {
    float *c = product.c + first_row * product.c_stride + first_column;
    const float *a = product.a + first_row * product.a_stride, *b = product.b + first_column;
    F32 sums[ROWS][VECTORS];
    UNROLL_FOR (int row = 0; row < ROWS; row++)
        UNROLL_FOR (int i = 0; i < VECTORS; i++)
            sums[row][i] = ACCUMULATE ? load(c + row * product.c_stride + LANES * i) * splat(product.factors[first_row + row])
                                      : splat(0.0f);
    for (int64_t k = 0; k < product.depth; k++, a++, b += product.b_stride) {
        F32 factors[VECTORS];
        UNROLL_FOR (int i = 0; i < VECTORS; i++) factors[i] = load(b + LANES * i);
        UNROLL_FOR (int row = 0; row < ROWS; row++) {
            F32 factor = splat(a[row * product.a_stride]);
            UNROLL_FOR (int i = 0; i < VECTORS; i++) sums[row][i] = add_product<IN_PAIRS>(factor, factors[i], sums[row][i]);
        }
    }
    UNROLL_FOR (int row = 0; row < ROWS; row++)
        UNROLL_FOR (int i = 0; i < VECTORS; i++) store(c + row * product.c_stride + LANES * i, sums[row][i]);
}

template <int ROWS, int VECTORS, int COLUMNS, bool ACCUMULATE, bool IN_PAIRS>
void multiply_tiles(const Product &product) {
    constexpr int FITTING = VECTORS * LANES < COLUMNS ? VECTORS : COLUMNS / LANES;
    for (int64_t column = 0; column < COLUMNS; column += FITTING * LANES)
        for (int64_t row = 0; row < product.num_rows; row += ROWS)
            multiply_tile<ROWS, FITTING, ACCUMULATE, IN_PAIRS>(product, row, column);
}

#if defined(__AMX_BF16__)
constexpr int TALL = 16;  // rows of the tallest tile; a and c have rows up to a multiple of it

// Sets the matrix units up for `num_rows`, sixteen at a time: two tiles of sums, one of a, two of b. 0: they are used no more.
INLINE void set_units(int64_t num_rows) {
    alignas(64) uint8_t shapes[64] = {num_rows > 0};  // of tiles: bytes of a row from 16 on, rows from 48 on
    for (int tile = 0; tile < 5; tile++)
        shapes[16 + 2 * tile] = 64, shapes[48 + tile] = tile > 2 || num_rows > TALL ? TALL : num_rows;
    _tile_loadconfig(shapes);
}

// The product of sixteen or more columns in pairs, sixteen pairs of depth at a time.
template <int COLUMNS, bool ACCUMULATE>
void multiply_in_units(const Product &product) {
    const int64_t c_bytes = 4 * product.c_stride, b_bytes = 4 * product.b_stride;
    constexpr bool BOTH = COLUMNS > LANES;
    for (int64_t row = 0; ACCUMULATE && row < product.num_rows; row++)
        UNROLL_FOR (int at = 0; at < COLUMNS; at += LANES) {
            float *c = product.c + row * product.c_stride + at;
            store(c, load(c) * splat(product.factors[row]));
        }
    for (int64_t row = 0; row < product.num_rows; row += TALL)
        UNROLL_FOR (int column = 0; column < COLUMNS; column += 2 * LANES) {
            float *c = product.c + row * product.c_stride + column;
            const float *a = product.a + row * product.a_stride, *b = product.b + column;
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (ACCUMULATE) _tile_loadd(0, c, c_bytes);
            if constexpr (ACCUMULATE && BOTH) _tile_loadd(1, c + LANES, c_bytes);
            for (int64_t k = 0; k < product.depth; k += LANES, b += LANES * product.b_stride) {
                _tile_loadd(2, a + k, 4 * product.a_stride);
                _tile_loadd(3, b, b_bytes);
                _tile_dpbf16ps(0, 2, 3);
                if constexpr (BOTH) _tile_loadd(4, b + LANES, b_bytes);
                if constexpr (BOTH) _tile_dpbf16ps(1, 2, 4);
            }
            _tile_stored(0, c, c_bytes);
            if constexpr (BOTH) _tile_stored(1, c + LANES, c_bytes);
        }
}
#else
constexpr int TALL = WIDE ? 4 : 6;
INLINE void set_units(int64_t) {}
#endif

// The product of COLUMNS columns, in tiles whose sums fit the registers: 32 of 16 floats, or 16 of 8.
template <int COLUMNS, bool ACCUMULATE, bool IN_PAIRS>
void multiply(const Product &product) {
#if defined(__AMX_BF16__)
    if (IN_PAIRS && product.depth % LANES == 0) return multiply_in_units<COLUMNS, ACCUMULATE>(product);
#endif
    if (product.num_rows == 1) return multiply_tiles<1, 4, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    if (product.num_rows == 2) return multiply_tiles<2, WIDE ? 4 : 2, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    if (product.num_rows <= 4) return multiply_tiles<4, WIDE ? 4 : 1, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    multiply_tiles<WIDE ? 4 : 6, WIDE ? 4 : 1, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
}
}  // namespace
