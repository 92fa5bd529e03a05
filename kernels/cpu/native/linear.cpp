// Matrix products whose rows do not depend on how many there are.
//
// An output is sixteen chains of multiply-adds over the inputs, lane by lane, added in a fixed tree and rounded once.
// x and weights are both read along their rows, as they lie. With AVX512-BF16 bfloat16 numbers are multiplied in pairs;
// elsewhere 16-bit weights are widened on the way, or once for all rows where there are many. Packed weights are unpacked
// on the way for one row and once for several.
//
//     cell      the running sum of one output: sixteen lanes
//     tile      the cells of a few rows and columns, in registers: multiply_tile
//     block     columns that are multiplied with all rows at hand before the next ones
//     panel     columns that a thread draws at a time, some blocks
//     group     32 inputs of a packed row, with a scale of their own
//     widened   converted to float32 (or to bfloat16 pairs) in scratch memory
#include "linear.h"

#include "int8_activations.h"
#include "packed.h"
#include "parallel.h"

namespace {

// Shapes of a tile whose sums stay in registers: 32 registers of sixteen floats with AVX-512, else 16 of eight (AVX2).
constexpr int TALL = WIDE ? 4 : 3;     // rows of a tile; else two or one
constexpr int COLUMNS = WIDE ? 4 : 2;  // columns of a tile with more than one row
constexpr int SINGLE_COLUMNS = 4;
constexpr int64_t BLOCK = WIDE ? 16 : 32;                   // columns multiplied with all rows at hand before the next
constexpr int64_t MAX_ROWS = WIDE ? 32 : 96;                // rows at hand
constexpr int64_t CACHE_BYTES = WIDE ? 96 << 10 : 1 << 22;  // of those rows
constexpr int64_t WIDENED_FROM_ROWS = 24;                   // rows worth widening 16-bit weights for (not if WIDE)
constexpr int64_t MAX_WIDENED = 1 << 16;                    // numbers of a widened block: the second-level cache
constexpr int64_t MAX_UNPACKED = 1 << 17;                   // words of columns unpacked for all rows: half of such a cache
constexpr int TILES_AHEAD = 2;                              // how far ahead memory is asked for
constexpr int LINE_BYTES = 64;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// --- products of a step of REG_LANES lanes ----------------------------------------------------------------------------

// float32 inputs with weights of Number, widened: one number a lane.
template <class Number>
struct SingleDot {
    static constexpr int64_t width = LANES, a_bytes = 4, b_bytes = Number::size;
    static FloatReg load_a(const char *source) {
        FloatReg value;
        memcpy(&value, source, sizeof value);
        return value;
    }
    static FloatReg load_b(const char *source) {
        if constexpr (Number::kind == FLOAT32) return load_a(source);
#if defined(__AVX512F__)
        __m256i half = _mm256_loadu_si256((const __m256i *)source);
        if constexpr (Number::kind == FLOAT16) return (FloatReg)_mm512_cvtph_ps(half);
        return (FloatReg)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
        __m128i half = _mm_loadu_si128((const __m128i *)source);
        if constexpr (Number::kind == FLOAT16) return (FloatReg)_mm256_cvtph_ps(half);
        return (FloatReg)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
        if constexpr (Number::kind == FLOAT16) return (FloatReg)vcvt_f32_f16(vld1_f16((const float16_t *)source));
        return (FloatReg)vshll_n_u16(vld1_u16((const uint16_t *)source), 16);
#endif
    }
    static FloatReg step(FloatReg a, FloatReg b, FloatReg sum) { return fma_reg(a, b, sum); }
};

#if defined(__AVX512BF16__)
// bfloat16 inputs and weights: two numbers a lane.
struct PairDot {
    static constexpr int64_t width = 2 * LANES, a_bytes = 2, b_bytes = 2;
    static FloatReg load_a(const char *source) { return SingleDot<Float32>::load_a(source); }
    static FloatReg load_b(const char *source) { return SingleDot<Float32>::load_a(source); }
    static FloatReg step(FloatReg a, FloatReg b, FloatReg sum) {
        return (FloatReg)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
};
#endif

// --- sums over lanes ------------------------------------------------------------------------------------------------

#define SHUFFLE __builtin_shufflevector
// Registers whose lanes are sums of two lanes of a (first half) and of b (second half).
template <int HALF>
INLINE FloatReg add_halves(FloatReg a, FloatReg b) {
#if defined(__AVX512F__)
    if constexpr (HALF == 8)
        return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    if constexpr (HALF == 4)
        return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    if constexpr (HALF == 2)
        return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
    if constexpr (HALF == 4) return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    if constexpr (HALF == 2) return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
    return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    if constexpr (HALF == 2) return SHUFFLE(a, b, 0, 1, 4, 5) + SHUFFLE(a, b, 2, 3, 6, 7);
    return SHUFFLE(a, b, 0, 2, 4, 6) + SHUFFLE(a, b, 1, 3, 5, 7);
#endif
}

template <int COUNT, int HALF>
INLINE void fold_registers(FloatReg *values) {
    if constexpr (HALF > 0) {
        constexpr int LEFT = COUNT > 1 ? COUNT / 2 : 1;
        UNROLL for (int i = 0; i < LEFT; i++)
            values[i] = add_halves<HALF>(values[2 * i], values[COUNT > 1 ? 2 * i + 1 : 0]);
        fold_registers<LEFT, HALF / 2>(values);
    }
}

// out[i] = the sum over the lanes of cell i, each in the same tree: lanes 8 apart, then 4, 2, 1.
template <int CELLS>
INLINE void sum_cells(const FloatReg (*cells)[REGS], float *out) {
    UNROLL for (int first = 0; first < CELLS; first += REG_LANES) {
        constexpr int COUNT = CELLS > REG_LANES ? REG_LANES : CELLS > 8 ? 16 : CELLS > 4 ? 8 : CELLS > 2 ? 4 : CELLS;
        FloatReg values[COUNT];
        UNROLL for (int i = 0; i < COUNT; i++) {
            const FloatReg *cell = cells[first + i < CELLS ? first + i : first];
            if constexpr (REGS == 4)
                values[i] = (cell[0] + cell[2]) + (cell[1] + cell[3]);
            else if constexpr (REGS == 2)
                values[i] = cell[0] + cell[1];
            else
                values[i] = cell[0];
        }
        fold_registers<COUNT, REG_LANES / 2>(values);
        memcpy(out + first, &values[0], 4 * (CELLS - first < REG_LANES ? CELLS - first : REG_LANES));
    }
}

// --- tiles ----------------------------------------------------------------------------------------------------------

// c (ROWS, COLS) = a (ROWS, depth) @ b (COLS, depth)^T, all strides in bytes. Asks for the rows of b that come AHEAD tiles
// later, into the cache of LEVEL.
template <int ROWS, int COLS, class Dot, int AHEAD, int LEVEL>
__attribute__((noinline)) void multiply_tile(char *c, int64_t c_stride, const char *a, int64_t a_stride, const char *b,
                                             int64_t b_stride, int64_t depth) {
    FloatReg sums[ROWS * COLS][REGS] = {};
    constexpr int64_t part = Dot::width / REGS;  // inputs of a register
    constexpr int lines = COLS * Dot::width * Dot::b_bytes / LINE_BYTES;
    const char *ahead = b + b_stride * (AHEAD * COLS);
    const int64_t rest = depth % Dot::width, whole = depth - rest;
    for (int64_t at = 0; at < whole; at += Dot::width) {
        if constexpr (AHEAD > 0) UNROLL
            for (int line = 0; line < lines; line++) prefetch<LEVEL>(ahead + COLS * Dot::b_bytes * at + LINE_BYTES * line);
        UNROLL for (int reg = 0; reg < REGS; reg++) {
            FloatReg inputs[ROWS];
            UNROLL for (int row = 0; row < ROWS; row++)
                inputs[row] = Dot::load_a(a + a_stride * row + Dot::a_bytes * (at + part * reg));
            UNROLL for (int column = 0; column < COLS; column++) {
                FloatReg weights = Dot::load_b(b + b_stride * column + Dot::b_bytes * (at + part * reg));
                UNROLL for (int row = 0; row < ROWS; row++) {
                    FloatReg &sum = sums[row * COLS + column][reg];
                    sum = Dot::step(inputs[row], weights, sum);
                }
            }
        }
    }
    if (rest) {
        char a_rest[ROWS][Dot::width * Dot::a_bytes] = {}, b_rest[COLS][Dot::width * Dot::b_bytes] = {};
        UNROLL for (int row = 0; row < ROWS; row++)
            memcpy(a_rest[row], a + a_stride * row + Dot::a_bytes * whole, Dot::a_bytes * rest);
        UNROLL for (int column = 0; column < COLS; column++)
            memcpy(b_rest[column], b + b_stride * column + Dot::b_bytes * whole, Dot::b_bytes * rest);
        UNROLL for (int reg = 0; reg < REGS; reg++) UNROLL
            for (int row = 0; row < ROWS; row++) UNROLL
                for (int column = 0; column < COLS; column++) {
                    FloatReg &sum = sums[row * COLS + column][reg];
                    sum = Dot::step(Dot::load_a(a_rest[row] + Dot::a_bytes * part * reg),
                                    Dot::load_b(b_rest[column] + Dot::b_bytes * part * reg), sum);
                }
    }
    float out[ROWS * COLS];
    sum_cells<ROWS * COLS>(sums, out);
    UNROLL for (int row = 0; row < ROWS; row++)
        memcpy(c + c_stride * row, out + COLS * row, 4 * COLS);
}

// Rows of the next tile: as many as possible, but never so that a single row is left where two pairs would do.
INLINE int64_t tile_rows(int64_t left) { return left >= TALL && (WIDE || left != 4) ? TALL : least(left, 2); }

// A block of columns of sums (rows, PANEL) = x (rows, depth) @ weights (columns, depth)^T.
struct Block {
    char *sums;
    const char *x, *weights;
    int64_t x_stride, weight_stride, rows, columns, depth;

    // A gap behind each widened row: rows of whole pages would compete for the same few places of the cache.
    int64_t widened_stride(bool pairs) const {
        const int64_t words = pairs ? (depth + 1) / 2 : depth;
        return 4 * LANES * ((words + 2 * LANES - 1) / LANES);
    }
};

// The sums of a block, one tile after the other. `from_memory`: the weights are not in the cache yet; `prefetches`: fetch
// those of the next block as well.
//
// From memory a CPU with AVX-512 reads a line fastest, as its prefetchers expect it, so the first rows take columns one by
// one: a Zen 4 core reads 24 GB/s so with one row, and 16 with four columns and prefetches. Rows that follow fetch the next
// block meanwhile: 0.7 of the time for 12 to 32 rows.
template <class Dot>
void multiply_rows(const Block &block, bool from_memory, bool prefetches) {
    constexpr int64_t c_stride = 4 * PANEL;
    constexpr int near = WIDE ? 0 : TILES_AHEAD, far = WIDE ? BLOCK / COLUMNS : TILES_AHEAD, far_level = WIDE ? 2 : 1;
    const int64_t a_stride = block.x_stride, b_stride = block.weight_stride, depth = block.depth;
    int64_t step;
    for (int64_t row = 0; row < block.rows; row += step) {
        step = tile_rows(block.rows - row);
        const char *a = block.x + a_stride * row;
        const int64_t width = step > 1 ? COLUMNS : SINGLE_COLUMNS;
        const int64_t whole = WIDE && from_memory && row == 0 ? 0 : block.columns / width * width;
        for (int64_t at = 0; at < whole; at += width) {
            char *c = block.sums + c_stride * row + 4 * at;
            const char *b = block.weights + b_stride * at;
            if (step == 1)
                multiply_tile<1, SINGLE_COLUMNS, Dot, near, 1>(c, c_stride, a, a_stride, b, b_stride, depth);
            else if (step == 2)
                multiply_tile<2, COLUMNS, Dot, near, 1>(c, c_stride, a, a_stride, b, b_stride, depth);
            else if (prefetches && row <= TALL)
                multiply_tile<TALL, COLUMNS, Dot, far, far_level>(c, c_stride, a, a_stride, b, b_stride, depth);
            else
                multiply_tile<TALL, COLUMNS, Dot, near, 1>(c, c_stride, a, a_stride, b, b_stride, depth);
        }
        for (int64_t at = whole; at < block.columns; at++) {
            char *c = block.sums + c_stride * row + 4 * at;
            const char *b = block.weights + b_stride * at;
            if (step == 1)
                multiply_tile<1, 1, Dot, 0, 1>(c, c_stride, a, a_stride, b, b_stride, depth);
            else if (step == 2)
                multiply_tile<2, 1, Dot, 0, 1>(c, c_stride, a, a_stride, b, b_stride, depth);
            else
                multiply_tile<TALL, 1, Dot, 0, 1>(c, c_stride, a, a_stride, b, b_stride, depth);
        }
    }
}

// --- packed weights ---------------------------------------------------------------------------------------------------

// c (COLS) = one row of x @ packed rows (COLS, groups)^T, unpacked on the way.
template <int COLS, class Format, bool PAIR>
__attribute__((noinline)) void multiply_packed(char *c, const char *x, const char *b, int64_t b_stride, int64_t num_groups) {
    FloatReg sums[COLS][REGS] = {};
    const char *ahead = b + b_stride * (TILES_AHEAD * COLS);
    for (int64_t group = 0; group < num_groups; group++) {
        for (int64_t line = 0; line < COLS * Format::block_bytes; line += LINE_BYTES)
            prefetch(ahead + COLS * Format::block_bytes * group + line);
        UNROLL for (int column = 0; column < COLS; column++) {
            const char *block = b + b_stride * column + Format::block_bytes * group;
            if constexpr (PAIR) {
#if defined(__AVX512BF16__)
                FloatReg inputs = PairDot::load_a(x + 2 * GROUP * group);
                sums[column][0] = PairDot::step(inputs, (FloatReg)block_pairs<Format>(block), sums[column][0]);
#endif
            } else {
                BlockHeader header = block_header(block);
                UNROLL for (int reg = 0; reg < REGS; reg++) UNROLL
                    for (int half = 0; half < 2; half++) {
                        const char *inputs = x + 4 * (GROUP * group + LANES * half + REG_LANES * reg);
                        FloatReg weights = block_numbers<Format>(block, header, half, reg);
                        sums[column][reg] = fma_reg(SingleDot<Float32>::load_a(inputs), weights, sums[column][reg]);
                    }
            }
        }
    }
    float out[COLS];
    sum_cells<COLS>(sums, out);
    memcpy(c, out, 4 * COLS);
}

template <class Format, bool PAIR>
void multiply_packed_columns(char *c, const char *x, const char *weights, int64_t stride, int64_t columns, int64_t groups) {
    constexpr int AT_ONCE = 4;
    const int64_t whole = columns / AT_ONCE * AT_ONCE;
    for (int64_t at = 0; at < whole; at += AT_ONCE)
        multiply_packed<AT_ONCE, Format, PAIR>(c + 4 * at, x, weights + stride * at, stride, groups);
    for (int64_t at = whole; at < columns; at++)
        multiply_packed<1, Format, PAIR>(c + 4 * at, x, weights + stride * at, stride, groups);
}

// --- a block of columns -----------------------------------------------------------------------------------------------

template <class Number>
void widen_rows(char *target, int64_t target_stride, const char *source, int64_t source_stride, int64_t rows, int64_t depth) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t at = 0; at < depth; at += LANES)
            store(target + target_stride * row + 4 * at,
                  load_numbers<Number>(source + source_stride * row + Number::size * at, depth - at));
}

template <class Number>
void multiply_widened(Block block) {
    const int64_t stride = block.widened_stride(false);
    char *widened = (char *)thread_scratch(WIDENED_WEIGHTS, MAX_WIDENED);
    widen_rows<Number>(widened, stride, block.weights, block.weight_stride, block.columns, block.depth);
    block.weights = widened, block.weight_stride = stride;
    multiply_rows<SingleDot<Float32>>(block, false, false);
}

template <class Format, class Dot>
void multiply_packed_block(const Block &block) {
    constexpr bool PAIR = Dot::a_bytes == 2;
    const int64_t groups = block.depth / GROUP, stride = block.widened_stride(PAIR), fitting = 4 * MAX_WIDENED / stride;
    if (block.rows == 1 || fitting == 0) {
        for (int64_t row = 0; row < block.rows; row++)
            multiply_packed_columns<Format, PAIR>(block.sums + 4 * PANEL * row, block.x + block.x_stride * row, block.weights,
                                                  block.weight_stride, block.columns, groups);
        return;
    }
    char *widened = (char *)thread_scratch(WIDENED_WEIGHTS, MAX_WIDENED);
    for (int64_t column = 0; column < block.columns; column += fitting) {
        Block part = block;
        part.sums += 4 * column, part.columns = least(fitting, block.columns - column);
        for (int64_t at = 0; at < part.columns; at++)
            unpack_groups<Format, PAIR>(widened + stride * at, block.weights + block.weight_stride * (column + at), groups);
        part.weights = widened, part.weight_stride = stride;
        multiply_rows<Dot>(part, false, false);
    }
}

// `first`: the first block of its panel, whose weights no prefetch has asked for.
void multiply_block(const Block &block, int64_t kind, bool in_pairs, bool first) {
    const bool from_memory = first || block.rows <= TALL;
#if defined(__AVX512BF16__)
    if (in_pairs) {
        if (!is_packed(kind)) return multiply_rows<PairDot>(block, from_memory, true);
        return with_packed(kind, [&](auto format) { multiply_packed_block<decltype(format), PairDot>(block); });
    }
#else
    (void)in_pairs;
#endif
    if (is_packed(kind))
        return with_packed(kind, [&](auto format) { multiply_packed_block<decltype(format), SingleDot<Float32>>(block); });
    const bool many = block.rows >= WIDENED_FROM_ROWS && block.columns * block.widened_stride(false) <= 4 * MAX_WIDENED;
    with_kind(kind, [&](auto number) {
        using Number = decltype(number);
        if constexpr (!WIDE && Number::kind != FLOAT32)
            if (many) return multiply_widened<Number>(block);
        multiply_rows<SingleDot<Number>>(block, from_memory, true);
    });
}

// As many rows as are kept at hand, in turns of about as many each: a last turn of one row would be slow.
int64_t rows_at_once(int64_t num_rows, int64_t row_bytes) {
    const int64_t limit = most(TALL, least(MAX_ROWS, CACHE_BYTES / (row_bytes + 1)) / TALL * TALL);
    const int64_t turns = (num_rows + limit - 1) / limit;
    if (turns < 2) return limit;
    return (num_rows + turns * TALL - 1) / (turns * TALL) * TALL;
}

// --- interface ----------------------------------------------------------------------------------------------------------

// Columns to unpack once for all rows, whole blocks of them; 0: weights are plain, or unpacked for each turn of rows.
int64_t columns_to_unpack(const tw_linear_args &args, bool several_turns) {
    if (!args.in_pairs || !is_packed(args.weight_kind) || !several_turns) return 0;
    return least(PANEL, 4 * MAX_UNPACKED / Block{.depth = args.num_inputs}.widened_stride(true) / BLOCK * BLOCK);
}

// Unpacks columns from `first` on to bfloat16, and returns the arguments with them as weights.
tw_linear_args unpack_columns(const tw_linear_args &args, int64_t first, int64_t columns) {
    const int64_t stride = Block{.depth = args.num_inputs}.widened_stride(true);
    char *widened = (char *)thread_scratch(WIDENED_WEIGHTS, MAX_UNPACKED);
    with_packed(args.weight_kind, [&](auto format) {
        for (int64_t at = 0; at < columns; at++) {
            const char *blocks = (const char *)args.weight + args.weight_stride * (first + at);
            unpack_groups<decltype(format), true>(widened + stride * at, blocks, args.num_inputs / GROUP);
        }
    });
    tw_linear_args unpacked = args;
    unpacked.weight = (address)widened - stride * first, unpacked.weight_stride = stride, unpacked.weight_kind = BFLOAT16;
    return unpacked;
}

// The blocks of a row; those of an interleaved one are gathered into `scratch`.
const char *row_blocks(const tw_unpack_args &args, int64_t row, char *scratch) {
    const char *panel = (const char *)args.blocks + args.row_stride * (row / LANES * LANES);
    const int64_t lane = row % LANES;
    if (!is_interleaved(args.kind) || row - lane + LANES > args.num_rows) return panel + args.row_stride * lane;
    read_interleaved_row(scratch, panel, args.kind, lane, args.num_groups);
    return scratch;
}

}  // namespace

void tw_linear(const void *linear_args, int64_t start, int64_t stop) {
    const tw_linear_args &args = *(const tw_linear_args *)linear_args;
    if (is_int8(args.weight_kind)) return multiply_int8(args, start, stop);
    const int64_t at_once = rows_at_once(args.num_tokens, (args.in_pairs ? 2 : 4) * args.num_inputs);
    alignas(64) float sums[MAX_ROWS * PANEL];
    const int64_t unpacked = columns_to_unpack(args, args.num_tokens > at_once), step = unpacked ? unpacked : PANEL;
    for (int64_t first = start; first < stop; first += step) {
        const int64_t outputs = least(step, stop - first);
        const tw_linear_args given = unpacked ? unpack_columns(args, first, outputs) : args;
        for (int64_t token = 0; token < args.num_tokens; token += at_once) {
            const int64_t rows = least(at_once, args.num_tokens - token);
            const char *x = (const char *)args.x + args.x_stride * token;
            for (int64_t column = 0; column < outputs; column += BLOCK) {
                Block block = {(char *)(sums + column),
                               x,
                               (const char *)given.weight + given.weight_stride * (first + column),
                               args.x_stride,
                               given.weight_stride,
                               rows,
                               least(BLOCK, outputs - column),
                               args.num_inputs};
                multiply_block(block, given.weight_kind, args.in_pairs, column == 0);
            }
            with_kind(args.kind, [&](auto number) {
                using Number = decltype(number);
                for (int64_t row = 0; row < rows; row++)
                    for (int64_t at = 0; at < outputs; at += LANES) {
                        const int64_t place = Number::size * (first + at), count = outputs - at;
                        F32 value = load(sums + row * PANEL + at);
                        if (args.bias) value = value + load_bias(args, first + at, count);
                        char *out = (char *)args.out + Number::size * (token + row) * args.num_outputs + place;
                        store_numbers<Number>(out, value, count);
                    }
            });
        }
    }
}

int64_t tw_panel(void) { return PANEL; }

int64_t tw_has_pairs(void) { return PAIRS; }

const char *prepare_rows(const char *x, int64_t num_rows, int64_t depth, int64_t kind, int64_t weight_kind, int64_t *stride) {
    if (is_int8(weight_kind)) return quantize_rows(x, num_rows, depth, kind, stride);
    if (kind == FLOAT32 || (PAIRS && kind == BFLOAT16)) {
        *stride = depth * size_of(kind);
        return x;
    }
    *stride = 4 * depth;
    char *rows = (char *)thread_scratch(PREPARED_ROWS, num_rows * depth + LANES);
    with_kind(kind,
              [&](auto number) { widen_rows<decltype(number)>(rows, *stride, x, depth * size_of(kind), num_rows, depth); });
    return rows;
}

void tw_unpack(const void *unpack_args, int64_t start, int64_t stop) {
    const tw_unpack_args &args = *(const tw_unpack_args *)unpack_args;
    with_packed(stored_kind(args.kind), [&](auto format) {
        using Format = decltype(format);
        char *scratch = (char *)thread_scratch(WIDENED_WEIGHTS, Format::block_bytes * args.num_groups / 4 + 1);
        with_kind(args.out_kind, [&](auto number) {
            using Number = decltype(number);
            for (int64_t row = start; row < stop; row++) {
                const char *blocks = row_blocks(args, args.indices ? ((const int64_t *)args.indices)[row] : row, scratch);
                for (int64_t group = 0; group < args.num_groups; group++) {
                    char numbers[4 * GROUP];
                    char *out = (char *)args.out + Number::size * GROUP * (args.num_groups * row + group);
                    unpack_groups<Format, false>(numbers, blocks + Format::block_bytes * group, 1);
                    Number::store(out, load(numbers));
                    Number::store(out + Number::size * LANES, load(numbers + 4 * LANES));
                }
            }
        });
    });
}
