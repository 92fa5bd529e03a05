// Products of several rows on registers of four or eight lanes: sixteen rows of x by sixteen outputs, one chain after the other.
//
// The lanes of a register are outputs. So one number of x serves a register of weights, nothing is added across lanes, and a tile
// needs 8 loads for 12 multiply-adds, where one whose lanes are inputs (tiles.h) needs 10. The chains are those of linear.cpp,
// added in the same tree, so the bits are the same. x and weights lie in panels: of sixteen rows the inputs of the first chain, which are
// every sixteenth, then those of the next chain.
#include "../parallel.h"
#include "linear.h"
#include "unpack.h"

namespace {

constexpr int TALLEST = 6;           // rows of a tile
constexpr int64_t PART_STEPS = 128;  // inputs of a chain at a time: x and weights in the nearest cache
constexpr int SUMS = LANES * LANES;  // of a panel of x with one of weights

// From one chain of a panel to the next: an odd number of cache lines, else chains would compete for the same places of the cache.
int64_t chain_stride(int64_t depth) { return 64 * ((depth + LANES - 1) / LANES | 1); }

// sums (ROWS, 16) = x (steps, 16)^T @ weights (steps, 16), added to what they are unless `first`.
template <int ROWS>
__attribute__((noinline)) void add_steps(float *sums, bool first, const float *x, const float *weights, int64_t steps) {
    char *target = (char *)sums;  // registers are copied one by one: see `load` in vec.h
    FloatReg cells[ROWS * REGS];
    UNROLL_FOR (int i = 0; i < ROWS * REGS; i++) cells[i] = first ? FloatReg{} : load_reg(target + sizeof(FloatReg) * i);
    for (; steps > 0; steps--, x += LANES, weights += LANES) {
        FloatReg those[REGS];
        UNROLL_FOR (int reg = 0; reg < REGS; reg++) those[reg] = load_reg((const char *)(weights + REG_LANES * reg));
        UNROLL_FOR (int row = 0; row < ROWS; row++)
            UNROLL_FOR (int reg = 0; reg < REGS; reg++)
                cells[row * REGS + reg] = fma_reg(splat_reg(x[row]), those[reg], cells[row * REGS + reg]);
    }
    UNROLL_FOR (int i = 0; i < ROWS * REGS; i++) memcpy(target + sizeof(FloatReg) * i, &cells[i], sizeof(FloatReg));
}

// The same for `rows` rows, at most ROWS.
template <int ROWS = TALLEST>
void add_rows(float *sums, bool first, const float *x, const float *weights, int64_t steps, int64_t rows) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return add_rows<ROWS - 1>(sums, first, x, weights, steps, rows);
    add_steps<ROWS>(sums, first, x, weights, steps);
}

// sums (rows, 16) = a panel of x with one of weights. `levels` has room for five such sums: those of 8, 4, 2 and 1 chains wait
// there for as many others.
const float *multiply_panels(float (&levels)[5][SUMS], const char *x, const char *weights, int64_t rows, int64_t depth) {
    const int64_t steps = (depth + LANES - 1) / LANES, num_tiles = (rows + TALLEST - 1) / TALLEST;
    for (int n = 0; n < LANES; n++) {
        const int chain = (n & 1) << 3 | (n & 2) << 1 | (n & 4) >> 1 | n >> 3;
        int level = __builtin_popcount(n);
        for (int64_t begin = 0; begin < steps; begin += PART_STEPS) {
            const int64_t place = chain_stride(depth) * chain + 64 * begin, part = least(PART_STEPS, steps - begin);
            const float *inputs = (const float *)(x + place), *those = (const float *)(weights + place);
            for (int64_t row = 0, tiles = num_tiles, tile; row < rows; row += tile, tiles--) {
                tile = (rows - row + tiles - 1) / tiles;
                add_rows(levels[level] + LANES * row, begin == 0, inputs + row, those, part, tile);
            }
        }
        for (int bit = 1; n & bit; bit *= 2, level--)
            for (int64_t i = 0; i < LANES * rows; i += LANES)
                store(levels[level - 1] + i, load(levels[level - 1] + i) + load(levels[level] + i));
    }
    return levels[0];
}

// The first (or last) eight codes of sixteen of `a` and of `b`, in turns; behind them those of the sixteen that follow.
INLINE Codes zip(Codes a, Codes b, bool last) {
#if defined(__x86_64__)
    return (Codes)(last ? _mm256_unpackhi_epi8((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi8((__m256i)a, (__m256i)b));
#else
    uint8x16_t x[2], y[2];
    memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y);
    for (int i = 0; i < 2; i++) x[i] = last ? vzip2q_u8(x[i], y[i]) : vzip1q_u8(x[i], y[i]);
    memcpy(&a, x, sizeof x);
    return a;
#endif
}

// Up to sixteen rows of blocks as a panel of the numbers that unpack_groups makes.
template <class Format>
void unpack_chains(char *panel, const char *rows, int64_t stride, int64_t num_rows, int64_t depth) {
    constexpr int groups = Format::num_groups, parts = Format::num_parts;
    Codes codes[LANES] = {}, zipped[LANES];
    for (int64_t at = 0; at < depth; at += GROUP * groups, rows += Format::num_bytes) {
        alignas(64) float scales[SUMS], minima[SUMS];  // of each part, sixteen rows
        for (int64_t row = 0; row < num_rows; row++) {
            prefetch(rows + stride * row + UNPACK_AHEAD);
            Scales<Format> own;
            own.read(rows + stride * row, groups);
            UNROLL_FOR (int part = 0; part < groups * parts; part++) {
                scales[LANES * part + row] = own.scales[part];
                if constexpr (Format::has_minimum) minima[LANES * part + row] = own.minima[part];
            }
        }
        for (unsigned group = 0; group < groups; group++) {
            for (int64_t row = 0; row < num_rows; row++) codes[row] = group_integers<Format>(rows + stride * row, group);
            UNROLL_FOR (int round = 0; round < 4; round++) {
                UNROLL_FOR (int i = 0; i < LANES; i++) zipped[i] = zip(codes[i / 2], codes[i / 2 + LANES / 2], i % 2);
                UNROLL_FOR (int i = 0; i < LANES; i++) codes[i] = zipped[i];
            }
            keep_in_memory(codes);
            char *target = panel + 4 * (at + GROUP * group);
            for (int k = 0; k < LANES; k++, target += chain_stride(depth))
                UNROLL_FOR (int lane = 0; lane < GROUP; lane += REG_LANES) {
                    const int64_t part = LANES * (group * parts + (parts == 2 ? lane / LANES : 0)) + lane % LANES;
                    FloatReg numbers = __builtin_convertvector(code_lanes(codes[k], lane), FloatReg);
                    const FloatReg scale = load_reg((const char *)(scales + part));
                    if constexpr (Format::has_minimum)
                        numbers = fma_reg(numbers, scale, load_reg((const char *)(minima + part)));
                    else
                        numbers = numbers * scale;
                    memcpy(target + 4 * lane, &numbers, sizeof numbers);
                }
        }
    }
}

// Up to sixteen outputs from `first` on as a panel in scratch memory.
const char *panel_of(const tw_linear_args &args, int64_t first, int64_t num_outputs) {
    const int64_t depth = args.num_inputs, kind = args.weight_kind;
    const char *weights = (const char *)args.weight + args.weight_stride * first;
    char *panel = (char *)thread_scratch(WEIGHT_TILES, chains_bytes(depth) / 4);
    if (!is_packed(kind)) return make_chains(panel, weights, args.weight_stride, num_outputs, depth, kind), panel;
    with_packed(kind,
                [&]<class Format>(Format) { unpack_chains<Format>(panel, weights, args.weight_stride, num_outputs, depth); });
    return panel;
}

}  // namespace

int64_t chains_bytes(int64_t depth) { return LANES * chain_stride(depth); }

void make_chains(char *panels, const char *rows, int64_t stride, int64_t num_rows, int64_t depth, int64_t kind) {
    with_kind(kind, [&]<class Number>(Number) {
        alignas(64) float block[LANES * LANES] = {};
        for (; num_rows > 0; num_rows -= LANES, panels += chains_bytes(depth), rows += LANES * stride)
            for (int64_t at = 0; at < depth; at += LANES) {
                for (int64_t row = 0; row < least(LANES, num_rows); row++)
                    store(block + LANES * row, load_numbers<Number>(rows + stride * row + Number::size * at, depth - at));
                transpose(block, LANES, (float *)(panels + 4 * at), chain_stride(depth) / 4);
            }
    });
}

void multiply_chains(const tw_linear_args &args, int64_t start, int64_t stop) {
    for (int64_t first = start; first < stop; first += LANES) {
        const int64_t count = least(LANES, stop - first);
        const char *panel = panel_of(args, first, count), *x = (const char *)args.x;
        for (int64_t token = 0; token < args.num_tokens; token += LANES, x += chains_bytes(args.num_inputs)) {
            alignas(64) float levels[5][SUMS];
            const int64_t rows = least(LANES, args.num_tokens - token);
            write_sums<LANES>(args, multiply_panels(levels, x, panel, rows, args.num_inputs), rows, count, token, first);
        }
    }
}
