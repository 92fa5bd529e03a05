// Tiles of a matrix product: cells of a few rows and columns that stay in registers, and the products of their lanes.
#pragma once
#include "../numbers.h"

namespace {
// float32 inputs with weights of Number, widened: one number a lane.
template <class Number>
struct SingleDot {
    static constexpr int64_t width = LANES, a_bytes = 4, b_bytes = Number::size;
    static FloatReg load_b(const char *source) { return Number::load_reg(source); }
    static FloatReg step(FloatReg a, FloatReg b, FloatReg sum) { return fma_reg(a, b, sum); }
};

#if defined(__AVX512BF16__)
// bfloat16 inputs and weights: two numbers a lane.
struct PairDot {
    static constexpr int64_t width = 2 * LANES, a_bytes = 2, b_bytes = 2;
    static FloatReg load_b(const char *source) { return load_reg(source); }
    static FloatReg step(FloatReg a, FloatReg b, FloatReg sum) {
        return (FloatReg)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#endif

template <int COUNT, int HALF>
INLINE void fold_registers(FloatReg *values) {
    if constexpr (HALF > 0) {
        constexpr int LEFT = COUNT > 1 ? COUNT / 2 : 1;
        UNROLL_FOR (int i = 0; i < LEFT; i++)
            values[i] = Lanes<REG_LANES>::low_halves<HALF>(values[2 * i], values[COUNT > 1 ? 2 * i + 1 : 0]) +
                        Lanes<REG_LANES>::high_halves<HALF>(values[2 * i], values[COUNT > 1 ? 2 * i + 1 : 0]);
        fold_registers<LEFT, HALF / 2>(values);
    }
}

// out[i] = the sum over the lanes of cell i, each in the same tree: lanes 8 apart, then 4, 2, 1.
template <int CELLS>
INLINE void sum_cells(const FloatReg (*cells)[REGS], float *out) {
    UNROLL_FOR (int first = 0; first < CELLS; first += REG_LANES) {
        constexpr int COUNT = CELLS > REG_LANES ? REG_LANES : CELLS > 8 ? 16 : CELLS > 4 ? 8 : CELLS > 2 ? 4 : CELLS;
        FloatReg values[COUNT];
        UNROLL_FOR (int i = 0; i < COUNT; i++) {
            const FloatReg *cell = cells[first + i < CELLS ? first + i : first];
            if constexpr (REGS == 4)
                values[i] = (cell[0] + cell[2]) + (cell[1] + cell[3]);
            else if constexpr (REGS == 2)
                values[i] = cell[0] + cell[1];
            else
                values[i] = cell[0];
        }
        fold_registers<COUNT, REG_LANES / 2>(values);
        values[0] = Lanes<REG_LANES>::reverse_bits(values[0]);  // cell i is there
        memcpy(out + first, &values[0], 4 * (CELLS - first < REG_LANES ? CELLS - first : REG_LANES));
    }
}

// Where a tile's cells are kept between parts of the depth: `before` this part (null: it is the first), and `after` it (null: the
// last, whose sums go to c).
struct Kept {
    const char *before;
    char *after;
};

// c (ROWS, COLS) = a (ROWS, depth) @ b (COLS, depth)^T, all strides in bytes. Asks for the rows of b that come AHEAD tiles
// later, into the cache of LEVEL.
template <int ROWS, int COLS, class Dot, int AHEAD, int LEVEL>
__attribute__((noinline)) void multiply_tile(char *c, int64_t c_stride, const char *a, int64_t a_stride, const char *b,
                                             int64_t b_stride, int64_t depth, Kept kept = {nullptr, nullptr}) {
    constexpr int64_t reg_bytes = sizeof(FloatReg);  // registers are copied one by one: see `load` in vec.h
    FloatReg sums[ROWS * COLS][REGS];
    UNROLL_FOR (int i = 0; i < ROWS * COLS * REGS; i++)
        sums[i / REGS][i % REGS] = kept.before ? load_reg(kept.before + reg_bytes * i) : FloatReg{};
    // Adds the products of sixteen lanes of each row and column.
    const auto add_step = [&](const char *a, int64_t a_stride, const char *b, int64_t b_stride) {
        constexpr int64_t part = Dot::width / REGS;  // inputs of a register
        UNROLL_FOR (int reg = 0; reg < REGS; reg++) {
            FloatReg inputs[ROWS];
            UNROLL_FOR (int row = 0; row < ROWS; row++) inputs[row] = load_reg(a + a_stride * row + Dot::a_bytes * part * reg);
            UNROLL_FOR (int column = 0; column < COLS; column++) {
                FloatReg weights = Dot::load_b(b + b_stride * column + Dot::b_bytes * part * reg);
                UNROLL_FOR (int row = 0; row < ROWS; row++) {
                    FloatReg &sum = sums[row * COLS + column][reg];
                    sum = Dot::step(inputs[row], weights, sum);
                }
            }
        }
    };
    constexpr int lines = COLS * Dot::width * Dot::b_bytes / LINE_BYTES;
    const char *ahead = b + b_stride * (AHEAD * COLS);
    const int64_t rest = depth % Dot::width, whole = depth - rest;
    for (int64_t at = 0; at < whole; at += Dot::width) {
        if constexpr (AHEAD > 0)
            UNROLL_FOR (int line = 0; line < lines; line++)
                prefetch<LEVEL>(ahead + COLS * Dot::b_bytes * at + LINE_BYTES * line);
        add_step(a + Dot::a_bytes * at, a_stride, b + Dot::b_bytes * at, b_stride);
    }
    if (rest) {
        char a_rest[ROWS][Dot::width * Dot::a_bytes] = {}, b_rest[COLS][Dot::width * Dot::b_bytes] = {};
        UNROLL_FOR (int row = 0; row < ROWS; row++)
            memcpy(a_rest[row], a + a_stride * row + Dot::a_bytes * whole, Dot::a_bytes * rest);
        UNROLL_FOR (int column = 0; column < COLS; column++)
            memcpy(b_rest[column], b + b_stride * column + Dot::b_bytes * whole, Dot::b_bytes * rest);
        add_step(a_rest[0], sizeof a_rest[0], b_rest[0], sizeof b_rest[0]);
    }
    if (kept.after) {
        UNROLL_FOR (int i = 0; i < ROWS * COLS * REGS; i++)
            memcpy(kept.after + reg_bytes * i, &sums[i / REGS][i % REGS], sizeof(FloatReg));
        return;
    }
    float out[ROWS * COLS];
    sum_cells<ROWS * COLS>(sums, out);
    UNROLL_FOR (int row = 0; row < ROWS; row++) memcpy(c + c_stride * row, out + COLS * row, 4 * COLS);
}

}  // namespace
