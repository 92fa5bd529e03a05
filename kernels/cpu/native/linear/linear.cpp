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

#include "../parallel.h"
#include "int8_activations.h"
#include "unpack.h"
#include "tiles.h"

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

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Rows of the next tile: as many as possible, but never so that a single row is left where two pairs would do.
INLINE int64_t tile_rows(int64_t left) { return left >= TALL && (WIDE || left != 4) ? TALL : least(left, 2); }

// Bytes of a widened row, with a gap behind it: rows of whole pages would compete for the same few places of the cache.
INLINE int64_t widened_stride(int64_t depth, bool pairs) {
    const int64_t words = pairs ? (depth + 1) / 2 : depth;
    return 4 * LANES * ((words + 2 * LANES - 1) / LANES);
}

// A block of columns of sums (rows, PANEL) = x (rows, depth) @ weights (columns, depth)^T.
struct Block {
    char *sums;
    const char *x, *weights;
    int64_t x_stride, weight_stride, rows, columns, depth;
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
    for (; num_groups > 0; num_groups -= Format::num_groups, b += Format::num_bytes, ahead += COLS * Format::num_bytes) {
        for (int64_t line = 0; line < COLS * Format::num_bytes; line += LINE_BYTES) prefetch(ahead + line);
        UNROLL for (int column = 0; column < COLS; column++) {
            const char *block = b + b_stride * column, *inputs = x;
            const Scales<Format> scales(block);
            UNROLL for (unsigned group = 0; group < Format::num_groups; group++, inputs += (PAIR ? 2 : 4) * GROUP) {
                if constexpr (PAIR) {
#if defined(__AVX512BF16__)
                    const FloatReg weights = (FloatReg)group_pairs(block, scales, group);
                    sums[column][0] = PairDot::step(PairDot::load_a(inputs), weights, sums[column][0]);
#endif
                } else {
                    with_group(block, scales, group, [&](int at, FloatReg weights) {
                        FloatReg &sum = sums[column][at / REG_LANES % REGS];
                        sum = fma_reg(SingleDot<Float32>::load_a(inputs + 4 * at), weights, sum);
                    });
                }
            }
        }
        x += (PAIR ? 2 : 4) * GROUP * Format::num_groups;
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
    const int64_t stride = widened_stride(block.depth, false);
    char *widened = (char *)thread_scratch(WIDENED_WEIGHTS, MAX_WIDENED);
    widen_rows<Number>(widened, stride, block.weights, block.weight_stride, block.columns, block.depth);
    block.weights = widened, block.weight_stride = stride;
    multiply_rows<SingleDot<Float32>>(block, false, false);
}

template <class Format, class Dot>
void multiply_packed_block(const Block &block) {
    constexpr bool PAIR = Dot::a_bytes == 2;
    const int64_t groups = block.depth / GROUP, stride = widened_stride(block.depth, PAIR), fitting = 4 * MAX_WIDENED / stride;
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
    const bool many = block.rows >= WIDENED_FROM_ROWS && block.columns * widened_stride(block.depth, false) <= 4 * MAX_WIDENED;
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
    return least(PANEL, 4 * MAX_UNPACKED / widened_stride(args.num_inputs, true) / BLOCK * BLOCK);
}

// Unpacks columns from `first` on to bfloat16, and returns the arguments with them as weights.
tw_linear_args unpack_columns(const tw_linear_args &args, int64_t first, int64_t columns) {
    const int64_t stride = widened_stride(args.num_inputs, true);
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
