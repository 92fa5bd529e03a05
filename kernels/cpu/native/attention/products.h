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

constexpr int TALL = WIDE ? 4 : 6;  // rows of the tallest tile; a and c have rows up to a multiple of it

// The product of COLUMNS columns, in tiles whose sums fit the registers: 32 of 16 floats, or 16 of 8.
template <int COLUMNS, bool ACCUMULATE, bool IN_PAIRS>
void multiply(const Product &product) {
    if (product.num_rows == 1) return multiply_tiles<1, 4, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    if (product.num_rows == 2) return multiply_tiles<2, WIDE ? 4 : 2, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    if (product.num_rows <= 4) return multiply_tiles<4, WIDE ? 4 : 1, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
    multiply_tiles<TALL, WIDE ? 4 : 1, COLUMNS, ACCUMULATE, IN_PAIRS>(product);
}
}  // namespace
