// Products of packed weights with activations in 8 bits (kernels/spec/packed_int8.py).
//
// Each group of 32 activations is rounded to int8 codes with one float32 scale. Sixteen outputs are multiplied together: their
// weights lie side by side, so that an int32 lane adds up one output, and four activations are broadcast to all lanes. A
// group's integer sum is exact; it is converted and added by one fused multiply-add, in the order of the groups. So the bits
// do not depend on the instructions, the shape of a tile, or the number of rows.
#include "int8_activations.h"

#include "packed.h"
#include "parallel.h"

namespace {

typedef int8_t Int8Reg __attribute__((vector_size(4 * REG_LANES)));
typedef int8_t Codes __attribute__((vector_size(REG_LANES)));

// Largest magnitudes up to this count as zero: 127 divided by them must be finite.
constexpr float TINY = 1e-30f;
constexpr int WORDS = GROUP / 4;  // of four codes each
constexpr int64_t WORD_BYTES = 4 * LANES;
// From so many rows on the CPU's own prefetchers are late, and memory is asked for so far ahead; with fewer they are faster alone.
constexpr int ROWS_TO_PREFETCH = 8;
constexpr int64_t AHEAD_BYTES = 2048;
constexpr int TALLEST = WIDE ? 12 : 2;  // rows of a tile

// A group of one row's activations. The offsets turn products of weights without a sign into those of code - 8, code - 128.
struct ActivationGroup {
    int8_t codes[GROUP];
    float scale, term;  // term = scale * sum of codes, for weights with a minimum
    int32_t offset_8, offset_128;
};

// --- activations ------------------------------------------------------------------------------------------------------

template <class Number>
void quantize_group(ActivationGroup *group, const char *source) {
    F32 x[2] = {Number::load(source), Number::load(source + Number::size * LANES)};
    const F32 zero = splat(0.0f);
    float most = max_lanes(maximum(maximum(x[0], zero - x[0]), maximum(x[1], zero - x[1])));
    // Infinity minus itself is NaN too: such a group makes all outputs NaN.
    const bool finite = mask_of(is_nan(x[0] - x[0]) | is_nan(x[1] - x[1])) == 0;
    const float inverse = finite && most > TINY ? 127.0f / most : 0.0f;
    int32_t sum = 0;
    for (int half = 0; half < 2; half++) {
        F32 scaled = finite ? x[half] * splat(inverse) : zero;
        I32 codes = bits_of(scaled + splat(ROUND_TO_INTEGER)) - bits_of(splat(ROUND_TO_INTEGER));
        sum += (int32_t)sum_lanes(to_float(codes));
        for (int i = 0; i < REGS; i++) {
            Codes narrow = __builtin_convertvector(codes.reg[i], Codes);
            memcpy(group->codes + LANES * half + REG_LANES * i, &narrow, sizeof narrow);
        }
    }
    group->scale = !finite ? __builtin_nanf("") : most > TINY ? most / 127.0f : 0.0f;
    group->term = group->scale * (float)sum;
    group->offset_8 = -8 * sum;
    group->offset_128 = -128 * sum;
}

// --- interleaved weights ----------------------------------------------------------------------------------------------

// Sixteen rows of blocks as one tile a group: their scales, their minima, then words of four code bytes, row beside row.
template <class Format>
struct Tile {
    static constexpr int64_t header_bytes = LANES * Format::header_bytes, bytes = LANES * Format::block_bytes;
    static constexpr int words = (Format::block_bytes - Format::header_bytes) / 4;
};

// Moves the block in `lane` of a tile into the tile, or out of it.
template <class Format, bool INTO>
INLINE void move_block(char *tile, char *block, int64_t lane) {
    for (int part = 0; part < Format::header_bytes / 2; part++) {
        char *own = tile + 2 * (LANES * part + lane), *other = block + 2 * part;
        memcpy(INTO ? own : other, INTO ? other : own, 2);
    }
    for (int word = 0; word < Tile<Format>::words; word++) {
        char *own = tile + Tile<Format>::header_bytes + WORD_BYTES * word + 4 * lane;
        char *other = block + Format::header_bytes + 4 * word;
        memcpy(INTO ? own : other, INTO ? other : own, 4);
    }
}

// Up to sixteen rows of blocks as a panel of tiles; the lanes of missing rows are zero.
template <class Format>
void interleave_rows(char *panel, const char *blocks, int64_t stride, int64_t num_rows, int64_t num_groups) {
    if (num_rows < LANES) memset(panel, 0, Tile<Format>::bytes * num_groups);
    for (int64_t group = 0; group < num_groups; group++)
        for (int64_t row = 0; row < num_rows; row++)
            move_block<Format, true>(panel + Tile<Format>::bytes * group,
                                     (char *)blocks + stride * row + Format::block_bytes * group, row);
}

// --- integer sums -----------------------------------------------------------------------------------------------------

// Four weights for each of a register's lanes: numbers 4 word to 4 word + 3 of the group.
template <class Format>
INLINE Int8Reg load_weights(const char *words, int word, int reg) {
    Int8Reg codes;
    memcpy(&codes, words + WORD_BYTES * (word % Tile<Format>::words) + sizeof codes * reg, sizeof codes);
    if constexpr (Format::bits == 8) return codes;
    if (word < Tile<Format>::words) return codes & 15;
    return (Int8Reg)((UintReg)codes >> 4) & 15;
}

INLINE int32_t load_int(const void *source) {
    int32_t value;
    memcpy(&value, source, sizeof value);
    return value;
}
INLINE IntReg broadcast(const void *source) { return IntReg{} + load_int(source); }

// What multiplication of codes without a sign adds to that of the codes less 8.
template <class Format>
INLINE IntReg offset_of(const ActivationGroup *group) {
    if constexpr (Format::bits == 4 && !Format::has_minimum) return broadcast(&group->offset_8);
    return IntReg{};
}

// A sum begins with `start`, adds a word with `step` and is exact after `finish`.
template <class Format>
struct IntegerDot {
#if defined(__AVX512VNNI__)
    // The first factor has no sign, so weights with one get 128 added.
    static IntReg start(const ActivationGroup *group) {
        if constexpr (Format::bits == 8) return broadcast(&group->offset_128);
        return offset_of<Format>(group);
    }
    static Int8Reg load(const char *words, int word, int reg) {
        Int8Reg weights = load_weights<Format>(words, word, reg);
        if constexpr (Format::bits == 8) return weights ^ (int8_t)0x80;
        return weights;
    }
    static IntReg step(IntReg sum, Int8Reg weights, const void *activations) {
        return (IntReg)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(load_int(activations)));
    }
    static IntReg finish(IntReg sum, const ActivationGroup *) { return sum; }
#elif defined(__x86_64__)
    // Pairs of products are added in 16 bits. Eight of four-bit codes stay below 2^15; one of eight-bit codes does,
    // with the sign moved from the weights to the activations.
    static IntReg start(const ActivationGroup *) { return IntReg{}; }
    static Int8Reg load(const char *words, int word, int reg) { return load_weights<Format>(words, word, reg); }
    static IntReg step(IntReg sum, Int8Reg weights, const void *activations) {
        IntReg codes = broadcast(activations);
#if defined(__AVX512F__)
        if constexpr (Format::bits == 4)
            return (IntReg)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)weights, (__m512i)codes));
        __mmask64 negative = _mm512_movepi8_mask((__m512i)weights);
        __m512i turned = _mm512_mask_sub_epi8((__m512i)codes, negative, _mm512_setzero_si512(), (__m512i)codes);
        __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8((__m512i)weights), turned);
        return (IntReg)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
        if constexpr (Format::bits == 4)
            return (IntReg)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)codes));
        __m256i turned = _mm256_sign_epi8((__m256i)codes, (__m256i)weights);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)weights), turned);
        return (IntReg)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
    static IntReg finish(IntReg sum, const ActivationGroup *group) {
        if constexpr (Format::bits == 8) return sum;
#if defined(__AVX512F__)
        sum = (IntReg)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#else
        sum = (IntReg)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
        return sum + offset_of<Format>(group);
    }
#else
    static IntReg start(const ActivationGroup *group) { return offset_of<Format>(group); }
    static Int8Reg load(const char *words, int word, int reg) { return load_weights<Format>(words, word, reg); }
    static IntReg step(IntReg sum, Int8Reg weights, const void *activations) {
        int8x16_t codes = vreinterpretq_s8_s32((int32x4_t)broadcast(activations));
#if defined(__ARM_FEATURE_DOTPROD)
        return (IntReg)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, codes);
#else
        int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)weights), vget_low_s8(codes));
        int16x8_t high = vmull_s8(vget_high_s8((int8x16_t)weights), vget_high_s8(codes));
        return sum + (IntReg)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
    }
    static IntReg finish(IntReg sum, const ActivationGroup *) { return sum; }
#endif
};

// --- products ---------------------------------------------------------------------------------------------------------

// out (ROWS, 16) = activations (ROWS, groups) @ panel^T.
template <int ROWS, class Format>
__attribute__((noinline)) void multiply_tile(float *out, const char *x, int64_t x_stride, const char *panel,
                                             int64_t num_groups) {
    using Dot = IntegerDot<Format>;
    FloatReg sums[ROWS][REGS] = {};
    const char *ahead = panel + AHEAD_BYTES;
    for (int64_t at = 0; at < num_groups; at++, panel += Tile<Format>::bytes, ahead += Tile<Format>::bytes) {
        const char *words = panel + Tile<Format>::header_bytes;
        const ActivationGroup *groups[ROWS];
        UNROLL for (int row = 0; row < ROWS; row++)
            groups[row] = (const ActivationGroup *)(x + x_stride * row) + at;
        if constexpr (ROWS >= ROWS_TO_PREFETCH) UNROLL
            for (int line = 0; line < Tile<Format>::bytes; line += 64) prefetch(ahead + line);
        IntReg dots[ROWS][REGS];
        UNROLL for (int row = 0; row < ROWS; row++) UNROLL
            for (int reg = 0; reg < REGS; reg++) dots[row][reg] = Dot::start(groups[row]);
        UNROLL for (int word = 0; word < WORDS; word++) UNROLL
            for (int reg = 0; reg < REGS; reg++) {
                Int8Reg weights = Dot::load(words, word, reg);
                UNROLL for (int row = 0; row < ROWS; row++)
                    dots[row][reg] = Dot::step(dots[row][reg], weights, groups[row]->codes + 4 * word);
            }
        const F32 scales = Float16::load(panel), minima = Float16::load(panel + (Format::has_minimum ? 2 * LANES : 0));
        UNROLL for (int row = 0; row < ROWS; row++) UNROLL
            for (int reg = 0; reg < REGS; reg++) {
                FloatReg dot = __builtin_convertvector(Dot::finish(dots[row][reg], groups[row]), FloatReg);
                FloatReg &sum = sums[row][reg];
                sum = fma_reg(dot, scales.reg[reg] * splat_reg(groups[row]->scale), sum);
                if constexpr (Format::has_minimum) sum = fma_reg(minima.reg[reg], splat_reg(groups[row]->term), sum);
            }
    }
    memcpy(out, sums, sizeof sums);
}

template <class Format>
int64_t multiply_rows(float *out, const char *x, int64_t x_stride, int64_t rows, const char *panel, int64_t num_groups) {
    if (WIDE && rows >= 12) return multiply_tile<WIDE ? 12 : 1, Format>(out, x, x_stride, panel, num_groups), 12;
    if (WIDE && rows >= 8) return multiply_tile<WIDE ? 8 : 1, Format>(out, x, x_stride, panel, num_groups), 8;
    if (WIDE && rows >= 4) return multiply_tile<WIDE ? 4 : 1, Format>(out, x, x_stride, panel, num_groups), 4;
    if (rows >= 2) return multiply_tile<2, Format>(out, x, x_stride, panel, num_groups), 2;
    return multiply_tile<1, Format>(out, x, x_stride, panel, num_groups), 1;
}

template <class Format>
void multiply_panel(const tw_linear_args &args, int64_t first, int64_t num_outputs) {
    const int64_t num_groups = args.num_inputs / GROUP;
    const char *panel = (const char *)args.weight + args.weight_stride * first;
    if (!is_interleaved(args.weight_kind) || num_outputs < LANES) {
        char *scratch = (char *)thread_scratch(WIDENED_WEIGHTS, Tile<Format>::bytes * num_groups / 4 + 1);
        interleave_rows<Format>(scratch, panel, args.weight_stride, num_outputs, num_groups);
        panel = scratch;
    }
    const F32 bias = args.bias ? load_bias(args, first, num_outputs) : splat(0.0f);
    int64_t step;
    for (int64_t token = 0; token < args.num_tokens; token += step) {
        alignas(64) float sums[TALLEST * LANES];
        const char *x = (const char *)args.x + args.x_stride * token;
        step = multiply_rows<Format>(sums, x, args.x_stride, args.num_tokens - token, panel, num_groups);
        with_kind(args.kind, [&](auto number) {
            using Number = decltype(number);
            for (int64_t row = 0; row < step; row++) {
                F32 value = load(sums + LANES * row);
                if (args.bias) value = value + bias;
                char *out = (char *)args.out + Number::size * ((token + row) * args.num_outputs + first);
                store_numbers<Number>(out, value, num_outputs);
            }
        });
    }
}

}  // namespace

void tw_quantize_rows(const void *quantize_args, int64_t start, int64_t stop) {
    const tw_quantize_args &args = *(const tw_quantize_args *)quantize_args;
    with_kind(args.kind, [&](auto number) {
        using Number = decltype(number);
        for (int64_t row = start; row < stop; row++) {
            const char *source = (const char *)args.x + args.x_stride * row;
            ActivationGroup *groups = (ActivationGroup *)args.out + args.num_groups * row;
            for (int64_t group = 0; group < args.num_groups; group++)
                quantize_group<Number>(groups + group, source + Number::size * GROUP * group);
        }
    });
}

int64_t tw_activation_group_bytes(void) { return sizeof(ActivationGroup); }

const char *quantize_rows(const char *x, int64_t num_rows, int64_t depth, int64_t kind, int64_t *stride) {
    const int64_t groups = depth / GROUP;
    *stride = sizeof(ActivationGroup) * groups;
    char *rows = (char *)thread_scratch(PREPARED_ROWS, *stride * num_rows / 4);
    tw_quantize_args args = {(address)rows, (address)x, depth * size_of(kind), kind, groups};
    tw_quantize_rows(&args, 0, num_rows);
    return rows;
}

void tw_interleave(const void *interleave_args, int64_t start, int64_t stop) {
    const tw_interleave_args &args = *(const tw_interleave_args *)interleave_args;
    with_packed(stored_kind(args.kind), [&](auto format) {
        using Format = decltype(format);
        const int64_t row_bytes = Format::block_bytes * args.num_groups;
        char *scratch = (char *)thread_scratch(WIDENED_WEIGHTS, LANES * row_bytes / 4 + 1);
        for (int64_t panel = start; panel < stop; panel++) {
            char *blocks = (char *)args.blocks + LANES * row_bytes * panel;
            interleave_rows<Format>(scratch, blocks, row_bytes, LANES, args.num_groups);
            memcpy(blocks, scratch, LANES * row_bytes);
        }
    });
}

void read_interleaved_row(char *blocks, const char *panel, int64_t kind, int64_t lane, int64_t num_groups) {
    with_packed(stored_kind(kind), [&](auto format) {
        using Format = decltype(format);
        for (int64_t group = 0; group < num_groups; group++)
            move_block<Format, false>((char *)panel + Tile<Format>::bytes * group, blocks + Format::block_bytes * group, lane);
    });
}

void multiply_int8(const tw_linear_args &args, int64_t start, int64_t stop) {
    with_packed(stored_kind(args.weight_kind), [&](auto format) {
        for (int64_t first = start; first < stop; first += LANES)
            multiply_panel<decltype(format)>(args, first, stop - first < LANES ? stop - first : LANES);
    });
}
