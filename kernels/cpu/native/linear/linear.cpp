// Matrix products whose rows do not depend on how many there are.
//
// An output is sixteen chains of multiply-adds over the inputs, lane by lane, added in a fixed tree and rounded once.
// x and weights are both read along their rows, as they lie: 16-bit weights are widened on the way, packed ones unpacked, for several
// rows once. With AVX512-BF16 bfloat16 is multiplied in pairs. On narrow registers chains.cpp multiplies several rows, to the same bits.
//
//     cell      the running sum of one output: sixteen lanes
//     tile      the cells of a few rows and columns, in registers: multiply_tile
//     block     columns that are multiplied with all rows at hand before the next ones
//     panel     columns that a thread draws at a time, some blocks
//     part      a run of inputs of a few widened columns
//     group     32 inputs of a packed row, with a scale of their own
//     widened   unpacked to float32 (or to bfloat16 pairs) in scratch memory
#include "linear.h"

#include "../parallel.h"
#include "matrix_units.h"
#include "unpack.h"
#include "tiles.h"

namespace {

// Shapes of a tile whose sums stay in registers: 32 registers of sixteen floats with AVX-512, else 16 of eight (AVX2).
constexpr int TALL = WIDE ? 4 : 3;     // rows of a tile; else two or one
constexpr int COLUMNS = WIDE ? 4 : 2;  // columns of a tile with more than one row
constexpr int SINGLE_COLUMNS = 4;
constexpr int64_t BLOCK = WIDE ? 16 : 32;                       // columns multiplied with all rows at hand before the next
constexpr int64_t MAX_ROWS = WIDE ? 32 : 96;                    // rows at hand
constexpr int64_t CACHE_BYTES = WIDE ? 96 << 10 : 1 << 22;      // of those rows
constexpr int64_t MAX_WIDENED = WIDE ? 1 << 19 : 1 << 18;       // bytes of widened columns: half of the second-level cache
constexpr int64_t PART_COLUMNS = 8, PART_BYTES = 2048;          // of widened columns: half of the nearest cache
constexpr int64_t PART_ROWS = WIDE ? 128 : 60;                  // rows at hand with widened columns
constexpr int64_t PART_ROW_BYTES = WIDE ? 600 << 10 : 1 << 22;  // of those rows: with columns in the second-level cache
constexpr int64_t MANY_ROWS = 60;                               // rows worth cutting columns into parts for
constexpr int TILES_AHEAD = 2;                                  // how far ahead memory is asked for

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

// A tile of `rows` (TALL, 2 or 1) and COLS columns at a place of the block.
template <int COLS, class Dot, int AHEAD, int LEVEL>
INLINE void multiply_rows_of_tile(const Block &block, int64_t rows, int64_t row, int64_t column, Kept kept = {}) {
    char *c = block.sums + 4 * PANEL * row + 4 * column;
    const char *a = block.x + block.x_stride * row, *b = block.weights + block.weight_stride * column;
    const auto multiply = rows == 1   ? multiply_tile<1, COLS, Dot, AHEAD, LEVEL>
                          : rows == 2 ? multiply_tile<2, COLS, Dot, AHEAD, LEVEL>
                                      : multiply_tile<TALL, COLS, Dot, AHEAD, LEVEL>;
    multiply(c, 4 * PANEL, a, block.x_stride, b, block.weight_stride, block.depth, kept);
}

// The sums of a block, one tile after the other. `from_memory`: the weights are not in the cache yet.
//
// From memory a CPU with AVX-512 reads a line fastest, as its prefetchers expect it, so the first rows take columns one by
// one: a Zen 4 core reads 24 GB/s so with one row, and 16 with four columns and prefetches. Rows that follow fetch the next
// block meanwhile: 0.7 of the time for 12 to 32 rows.
template <class Dot>
void multiply_rows(const Block &block, bool from_memory) {
    constexpr int near = WIDE ? 0 : TILES_AHEAD, far = WIDE ? BLOCK / COLUMNS : TILES_AHEAD, far_level = WIDE ? 2 : 1;
    int64_t step;
    for (int64_t row = 0; row < block.rows; row += step) {
        step = tile_rows(block.rows - row);
        const int64_t width = step > 1 ? COLUMNS : SINGLE_COLUMNS;
        const int64_t whole = WIDE && from_memory && row == 0 ? 0 : block.columns / width * width;
        for (int64_t at = 0; at < whole; at += width)
            if (step == 1)
                multiply_rows_of_tile<SINGLE_COLUMNS, Dot, near, 1>(block, 1, row, at);
            else if (step == TALL && row <= TALL)
                multiply_rows_of_tile<COLUMNS, Dot, far, far_level>(block, TALL, row, at);
            else
                multiply_rows_of_tile<COLUMNS, Dot, near, 1>(block, step, row, at);
        for (int64_t at = whole; at < block.columns; at++) multiply_rows_of_tile<1, Dot, 0, 1>(block, step, row, at);
    }
}

// The sums of a block with many rows, or of widened weights. What fits the nearest cache, a part of eight columns, is multiplied with
// all rows before the next part, and cells are kept meanwhile: a Zen 5 core, which can do 550 GFLOP/s, does 470 to 490 so with 896 to
// 4608 inputs, and 480 to 270 with all inputs at a time.
template <class Dot>
void multiply_in_parts(const Block &block) {
    const int64_t num_parts = (Dot::b_bytes * block.depth + PART_BYTES - 1) / PART_BYTES;
    const int64_t part_inputs = (block.depth + GROUP * num_parts - 1) / (GROUP * num_parts) * GROUP;
    alignas(64) char cells[PART_ROWS * PART_COLUMNS * 4 * LANES];
    for (int64_t column = 0; column < block.columns; column += PART_COLUMNS) {
        const int64_t columns = least(PART_COLUMNS, block.columns - column), whole = columns / COLUMNS * COLUMNS;
        for (int64_t begin = 0; begin < block.depth; begin += part_inputs) {
            Block part = block;
            part.sums += 4 * column, part.x += Dot::a_bytes * begin;
            part.weights += block.weight_stride * column + Dot::b_bytes * begin;
            part.depth = least(part_inputs, block.depth - begin);
            char *cell = cells;
            int64_t step;
            for (int64_t row = 0; row < block.rows; row += step) {
                step = tile_rows(block.rows - row);
                for (int64_t at = 0, width; at < columns; at += width) {
                    width = at < whole ? COLUMNS : 1;
                    const Kept kept = {begin ? cell : nullptr, begin + part_inputs < block.depth ? cell : nullptr};
                    cell += 4 * LANES * step * width;
                    if (width == 1)
                        multiply_rows_of_tile<1, Dot, 0, 1>(part, step, row, at, kept);
                    else
                        multiply_rows_of_tile<COLUMNS, Dot, 0, 1>(part, step, row, at, kept);
                }
            }
        }
    }
}

// c (COLS) = one row of x @ packed rows (COLS, groups)^T, unpacked on the way.
template <int COLS, class Format, bool PAIR>
__attribute__((noinline)) void multiply_packed(char *c, const char *x, const char *b, int64_t b_stride, int64_t num_groups) {
    constexpr int TOGETHER = WIDE ? 1 : COLS;  // columns whose groups take turns
    FloatReg sums[COLS][REGS] = {};
    const char *ahead = b + b_stride * (TILES_AHEAD * COLS);
    for (int64_t count; num_groups > 0; num_groups -= count) {
        count = least(Scales<Format>::run_groups, num_groups);
        const int64_t num_bytes = count / Format::num_groups * Format::num_bytes;
        for (int64_t line = 0; line < COLS * num_bytes; line += LINE_BYTES) prefetch(ahead + line);
        UNROLL_FOR (int turn = 0; turn < COLS / TOGETHER; turn++) {
            const int column = TOGETHER * turn;
            Scales<Format> scales[TOGETHER];
            UNROLL_FOR (int i = 0; i < TOGETHER; i++) scales[i].read(b + b_stride * (column + i), count);
            with_groups<Format>(count, [&](int64_t first, unsigned group) {
                const char *inputs = x + (PAIR ? 2 : 4) * GROUP * (first + group);
                if constexpr (PAIR) {
#if defined(__AVX512BF16__)
                    const FloatReg weights = (FloatReg)group_pairs(b + b_stride * column, scales[0], first, group);
                    sums[column][0] = PairDot::step(load_reg(inputs), weights, sums[column][0]);
#endif
                } else {
                    Codes codes[TOGETHER];
                    UNROLL_FOR (int i = 0; i < TOGETHER; i++)
                        read_group<Format>(codes[i], b + b_stride * (column + i), first, group);
                    UNROLL_FOR (int i = 0; i < TOGETHER; i++)
                        with_group(codes[i], b + b_stride * (column + i), scales[i], first, group,
                                   [&](int at, FloatReg weights) {
                                       FloatReg &sum = sums[column + i][at / REG_LANES % REGS];
                                       sum = fma_reg(load_reg(inputs + 4 * at), weights, sum);
                                   });
                }
            });
        }
        x += (PAIR ? 2 : 4) * GROUP * count, b += num_bytes, ahead += COLS * num_bytes;
    }
    float out[COLS];
    sum_cells<COLS>(sums, out);
    memcpy(c, out, 4 * COLS);
}

// The sums of a panel of plain weights, a block after the other.
template <class Dot>
void multiply_plain(const Block &panel, int64_t kind) {
    Block block = panel;
    for (int64_t column = 0; column < panel.columns; column += BLOCK) {
        block.sums = panel.sums + 4 * column, block.weights = panel.weights + panel.weight_stride * column;
        block.columns = least(BLOCK, panel.columns - column);
        const bool from_memory = column == 0 || block.rows <= TALL;  // no prefetch has asked for the first block
        if constexpr (Dot::b_bytes == 2)
            multiply_rows<Dot>(block, from_memory);
        else
            with_kind(kind, [&]<class Number>(Number) { multiply_rows<SingleDot<Number>>(block, from_memory); });
    }
}

// The sums of a row with packed weights, unpacked on the way.
template <class Dot>
void multiply_packed_row(const Block &block, int64_t kind) {
    with_packed(kind, [&]<class Format>(Format) {
        constexpr bool PAIR = Dot::b_bytes == 2;
        const int64_t groups = block.depth / GROUP, whole = block.columns / SINGLE_COLUMNS * SINGLE_COLUMNS;
        for (int64_t at = 0, width; at < block.columns; at += width) {
            width = at < whole ? SINGLE_COLUMNS : 1;
            const auto multiply = width == 1 ? multiply_packed<1, Format, PAIR> : multiply_packed<SINGLE_COLUMNS, Format, PAIR>;
            multiply(block.sums + 4 * at, block.x, block.weights + block.weight_stride * at, block.weight_stride, groups);
        }
    });
}

// The block with its weights unpacked in scratch memory. Inline, GCC would leave parts of unpacking outside.
template <class Dot>
__attribute__((noinline)) Block widened(Block block, int64_t kind) {
    const int64_t stride = widened_stride(block.depth, Dot::b_bytes == 2);
    char *target = (char *)thread_scratch(WIDENED_WEIGHTS, stride / 4 * block.columns);
    with_packed(kind, [&]<class Format>(Format) {
        for (int64_t at = 0; at < block.columns; at++) {
            const char *row = block.weights + block.weight_stride * at;
            unpack_groups<Format, Dot::b_bytes == 2>(target + stride * at, row, block.depth / GROUP, row + UNPACK_AHEAD);
        }
    });
    block.weights = target, block.weight_stride = stride;
    return block;
}

template <class Dot>
void multiply_outputs(const tw_linear_args &args, int64_t start, int64_t stop) {
    const int64_t kind = args.weight_kind, num_tokens = args.num_tokens, depth = args.num_inputs;
    const bool widens = is_packed(kind) && num_tokens > 1;
    const bool in_parts = widens || (Dot::b_bytes == 2 && num_tokens > MANY_ROWS);
    const int64_t fitting = (in_parts ? PART_ROW_BYTES : CACHE_BYTES) / (Dot::a_bytes * depth + 1);
    const int64_t limit = most(TALL, least(in_parts ? PART_ROWS : MAX_ROWS, fitting) / TALL * TALL);
    // As many rows as are kept at hand, in turns of about as many each: a last turn of one row would be slow.
    const int64_t turns = (num_tokens + limit - 1) / limit;
    const int64_t at_once = turns < 2 ? limit : (num_tokens + turns * TALL - 1) / (turns * TALL) * TALL;
    int64_t step = PANEL;  // columns at a time: widened ones in the second-level cache, or in the nearest for few rows
    if (widens && num_tokens <= at_once) step = BLOCK;
    if (widens) step = most(PART_COLUMNS, least(step, MAX_WIDENED / widened_stride(depth, Dot::b_bytes == 2) & -PART_COLUMNS));
    alignas(64) float sums[(MAX_ROWS > PART_ROWS ? MAX_ROWS : PART_ROWS) * PANEL];
    for (int64_t first = start; first < stop; first += step) {
        const char *weights = (const char *)args.weight + args.weight_stride * first;
        Block block = {(char *)sums, nullptr, weights, args.x_stride, args.weight_stride, 0, least(step, stop - first), depth};
        if (widens) block = widened<Dot>(block, kind);
        for (int64_t token = 0; token < num_tokens; token += at_once) {
            block.rows = least(at_once, num_tokens - token), block.x = (const char *)args.x + args.x_stride * token;
            if (in_parts)
                multiply_in_parts<Dot>(block);
            else if (is_packed(kind))
                multiply_packed_row<Dot>(block, kind);
            else
                multiply_plain<Dot>(block, kind);
            write_sums(args, sums, block.rows, block.columns, token, first);
        }
    }
}

}  // namespace

void tw_linear(const void *linear_args, int64_t start, int64_t stop) {
    const tw_linear_args &args = *(const tw_linear_args *)linear_args;
    if (is_int8(args.weight_kind)) return multiply_int8(args, start, stop);
#if defined(__AMX_BF16__)
    if (args.in_pairs && args.num_tokens && args.num_inputs)
        return args.num_tokens > FEW_ROWS ? multiply_many_rows(args, start, stop) : multiply_few_rows(args, start, stop);
#elif defined(__AVX512BF16__)
    if (args.in_pairs) return multiply_outputs<PairDot>(args, start, stop);
#endif
    if (in_chains(args.num_tokens, args.weight_kind)) return multiply_chains(args, start, stop);
    multiply_outputs<SingleDot<Float32>>(args, start, stop);
}

int64_t tw_panel(void) { return PANEL; }
int64_t tw_gated_rows(void) { return UNITS ? FEW_ROWS + 1 : 0; }
int64_t tw_outputs_at_once(const void *linear_args, int64_t num_threads) {
    const tw_linear_args &args = *(const tw_linear_args *)linear_args;
    if (!UNITS || !args.in_pairs || is_int8(args.weight_kind) || args.num_tokens <= FEW_ROWS) return PANEL;
    const int64_t blocks = most(1, (args.num_outputs + 2 * LANES - 1) / (2 * LANES));
    return (blocks + num_threads - 1) / num_threads * 2 * LANES;
}
int64_t tw_has_pairs(void) { return PAIRS; }

int64_t tw_prepared_bytes(const void *rows_args) {
    const tw_rows_args &args = *(const tw_rows_args *)rows_args;
    if (is_int8(args.weight_kind)) return args.num_rows * quantized_bytes(args.num_inputs);
    if (in_tiles(args)) return tiled_bytes(args.num_rows, args.num_inputs);
    if (in_chains(args.num_rows, args.weight_kind)) return (args.num_rows + LANES - 1) / LANES * chains_bytes(args.num_inputs);
    return args.kind == FLOAT32 || (PAIRS && args.kind == BFLOAT16) ? 0 : 4 * args.num_rows * args.num_inputs;
}

int64_t tw_prepared_stride(const void *rows_args) {
    const tw_rows_args &args = *(const tw_rows_args *)rows_args;
    if (in_tiles(args)) return TILED;
    const int64_t bytes = tw_prepared_bytes(rows_args);
    return bytes ? bytes / args.num_rows : args.x_stride;
}

void tw_prepare_rows(const void *rows_args, int64_t start, int64_t stop) {
    const tw_rows_args &args = *(const tw_rows_args *)rows_args;
    const int64_t row = LANES * start, rows = least(LANES * stop, args.num_rows) - row, depth = args.num_inputs;
    const char *x = (const char *)args.x + args.x_stride * row;
    char *out = (char *)args.out;
    if (is_int8(args.weight_kind))
        return quantize_rows(out + quantized_bytes(depth) * row, x, args.x_stride, rows, depth, args.kind);
#if defined(__AMX_BF16__)
    if (in_tiles(args))
        return make_tiles(out + tile_bytes(args.num_rows) * tile_steps(depth) * start, x, args.x_stride, rows, args.num_rows,
                          depth);
#endif
    if (in_chains(args.num_rows, args.weight_kind))
        return make_chains(out + chains_bytes(depth) * start, x, args.x_stride, rows, depth, args.kind);
    with_kind(args.kind, [&]<class Number>(Number) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t at = 0; at < depth; at += LANES)
                store_numbers<Float32>(out + 4 * (depth * (row + i) + at),
                                       load_numbers<Number>(x + args.x_stride * i + Number::size * at, depth - at), depth - at);
    });
}

const char *prepare_rows(const char *x, int64_t num_rows, int64_t depth, int64_t kind, int64_t weight_kind, int64_t *stride) {
    tw_rows_args args = {0, (address)x, depth * size_of(kind), num_rows, depth, 0, kind, weight_kind};
    const int64_t bytes = tw_prepared_bytes(&args);
    *stride = tw_prepared_stride(&args);
    if (!bytes) return x;
    args.out = (address)thread_scratch(PREPARED_ROWS, bytes / 4);
    tw_prepare_rows(&args, 0, (num_rows + LANES - 1) / LANES);
    return (const char *)args.out;
}
