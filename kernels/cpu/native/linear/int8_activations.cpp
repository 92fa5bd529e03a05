// Products of packed weights with activations in 8 bits (kernels/spec/packed_int8.py).
//
// Each group of 32 activations is rounded to int8 codes with one float32 scale. Sixteen outputs are multiplied together: their
// weights lie side by side, so that an int32 lane adds up one output, and four activations are broadcast to all lanes. A
// group's integer sum is exact; it is converted and added by one fused multiply-add, in the order of the groups. So the bits
// do not depend on the instructions, the shape of a tile, or the number of rows. With matrix units (AMX) rows are taken by
// sixteens, where there are enough of them.
#include "../parallel.h"
#include "interleaved.h"
#include "linear.h"

namespace {

typedef int8_t Int8Reg __attribute__((vector_size(4 * REG_LANES)));
typedef int16_t ShortReg __attribute__((vector_size(4 * REG_LANES)));
typedef int8_t NarrowReg __attribute__((vector_size(REG_LANES)));

// Largest magnitudes up to this count as zero: 127 divided by them must be finite.
constexpr float TINY = 1e-30f;
// From so many rows on the CPU's own prefetchers are late, and memory is asked for so far ahead; with fewer they are faster alone.
constexpr int ROWS_TO_PREFETCH = 8;
constexpr int64_t AHEAD_BYTES = 2048;
constexpr int TALLEST = WIDE ? 12 : REGS == 2 ? 4 : 2;  // rows of a tile

// A group of one row's activations, in a cache line. `terms` (scale * sum of codes, for weights with a minimum) and `minus_sums` (for
// codes with an offset) are those of the first half, the second half, and all.
struct ActivationGroup {
    int8_t codes[GROUP];
    float scale, terms[3];
    int32_t minus_sums[3], unused;
};

template <class Number>
void quantize_group(ActivationGroup *group, const char *source) {
    F32 x[2] = {Number::load(source), Number::load(source + Number::size * LANES)};
    const F32 zero = splat(0.0f);
    float most = max_lanes(maximum(maximum(x[0], zero - x[0]), maximum(x[1], zero - x[1])));
    // Infinity minus itself is NaN too: such a group makes all outputs NaN.
    const bool finite = mask_of(is_nan(x[0] - x[0]) | is_nan(x[1] - x[1])) == 0;
    const float inverse = finite && most > TINY ? 127.0f / most : 0.0f;
    group->scale = !finite ? __builtin_nanf("") : most > TINY ? most / 127.0f : 0.0f;
    int32_t sums[3] = {};
    for (int half = 0; half < 2; half++) {
        F32 scaled = finite ? x[half] * splat(inverse) : zero;
        I32 codes = bits_of(scaled + splat(ROUND_TO_INTEGER)) - bits_of(splat(ROUND_TO_INTEGER));
        sums[half] = (int32_t)sum_lanes(to_float(codes));
        for (int i = 0; i < REGS; i++) {
            NarrowReg narrow = __builtin_convertvector(codes.reg[i], NarrowReg);
            memcpy(group->codes + LANES * half + REG_LANES * i, &narrow, sizeof narrow);
        }
    }
    sums[2] = sums[0] + sums[1];
    for (int i = 0; i < 3; i++) group->terms[i] = group->scale * (float)sums[i], group->minus_sums[i] = -sums[i];
}

// Four codes for each of a register's lanes: those `at` numbers behind `number` and the next, with a sign if the format has no offset.
template <class Format>
INLINE Int8Reg load_weights(TileSource source, unsigned number, unsigned at) {
    UintReg codes = read_codes<Format, 0x01010101>(number, at, [&](unsigned place) { return source.word(place); });
    if constexpr (Format::fifths_at > 0) codes |= (source.word(Format::fifths_at) >> ((number + at) / 4) & 0x01010101) << 4;
    if constexpr (Format::table != nullptr) codes = look_up<Format>(codes);
    return (Int8Reg)codes;
}

INLINE IntReg broadcast(const void *source) { return IntReg{} + (int32_t)load_bits((const char *)source, 4); }

// A sum begins with `start`, adds a word with `step`, which keeps `pairs`, and is exact after `finish`. `minus_sum`: of activations.
template <class Format>
struct IntegerDot {
    static constexpr bool has_sign = Format::Low::bits == 8 || Format::table != nullptr;
    static constexpr int bits = Format::Low::bits + Format::High::bits + (Format::fifths_at > 0);
    static constexpr unsigned num_steps = GROUP / Format::num_parts / 4;  // of a part
    // What multiplication of codes adds to that of the codes less the offset.
    static IntReg correction(const int32_t *minus_sum) {
        if constexpr (Format::offset == 0) return IntReg{};
        return broadcast(minus_sum) * Format::offset;
    }
    static Int8Reg load(TileSource source, unsigned number, unsigned at) {
        Int8Reg weights = load_weights<Format>(source, number, at);
        if constexpr (adds_128) return weights ^ (int8_t)0x80;
        return weights;
    }
#if defined(__AVX512VNNI__)
    // The first factor has no sign, so weights with one get 128 added.
    static constexpr bool adds_128 = has_sign;
    static IntReg start(const int32_t *minus_sum) {
        if constexpr (has_sign) return broadcast(minus_sum) * 128;
        return correction(minus_sum);
    }
    static IntReg step(IntReg sum, ShortReg &, unsigned, Int8Reg weights, const void *activations) {
        return (IntReg)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)broadcast(activations));
    }
    static IntReg finish(IntReg sum, const int32_t *) { return sum; }
#elif defined(__x86_64__)
    // Pairs of products are added in 16 bits, for as many steps as stay below 2^15: one, if a sign is moved to the activations.
    static constexpr unsigned short_steps = has_sign || bits > 6 ? 1 : bits == 6 ? 2 : bits == 5 ? 4 : 8;
    static IntReg start(const int32_t *) { return IntReg{}; }
    static constexpr bool adds_128 = false;
#if defined(__AVX512F__)
    static ShortReg pairs_of(Int8Reg weights, IntReg codes) {
        if constexpr (has_sign) {
            __mmask64 negative = _mm512_movepi8_mask((__m512i)weights);
            codes = (IntReg)_mm512_mask_sub_epi8((__m512i)codes, negative, _mm512_setzero_si512(), (__m512i)codes);
            weights = (Int8Reg)_mm512_abs_epi8((__m512i)weights);
        }
        return (ShortReg)_mm512_maddubs_epi16((__m512i)weights, (__m512i)codes);
    }
    static IntReg add_pairs(ShortReg pairs) { return (IntReg)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
#else
    static ShortReg pairs_of(Int8Reg weights, IntReg codes) {
        if constexpr (has_sign) {
            codes = (IntReg)_mm256_sign_epi8((__m256i)codes, (__m256i)weights);
            weights = (Int8Reg)_mm256_abs_epi8((__m256i)weights);
        }
        return (ShortReg)_mm256_maddubs_epi16((__m256i)weights, (__m256i)codes);
    }
    static IntReg add_pairs(ShortReg pairs) { return (IntReg)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#endif
    static IntReg step(IntReg sum, ShortReg &pairs, unsigned step, Int8Reg weights, const void *activations) {
        const ShortReg own = pairs_of(weights, broadcast(activations));
        pairs = step % short_steps ? pairs + own : own;
        const bool is_last = step % short_steps + 1 == short_steps || step + 1 == num_steps;
        return is_last ? sum + add_pairs(pairs) : sum;
    }
    static IntReg finish(IntReg sum, const int32_t *minus_sum) { return sum + correction(minus_sum); }
#else
    static IntReg start(const int32_t *minus_sum) { return correction(minus_sum); }
    static constexpr bool adds_128 = false;
    static IntReg step(IntReg sum, ShortReg &, unsigned, Int8Reg weights, const void *activations) {
        int8x16_t codes = vreinterpretq_s8_s32((int32x4_t)broadcast(activations));
#if defined(__ARM_FEATURE_DOTPROD)
        return (IntReg)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, codes);
#else
        int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)weights), vget_low_s8(codes));
        int16x8_t high = vmull_s8(vget_high_s8((int8x16_t)weights), vget_high_s8(codes));
        return sum + (IntReg)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
    }
    static IntReg finish(IntReg sum, const int32_t *) { return sum; }
#endif
};

// Adds to `sums` the products with a part of a group: numbers from `number` on of the tile's blocks, the activations of `groups`.
template <int ROWS, class Format>
INLINE void add_part(FloatReg (&sums)[ROWS][REGS], const char *tile, const ActivationGroup *const *groups, unsigned number) {
    using Dot = IntegerDot<Format>;
    constexpr unsigned part_elems = GROUP / Format::num_parts;
    const unsigned in_group = number % GROUP, half = Format::num_parts == 2 ? in_group / part_elems : 2;
    IntReg dots[ROWS][REGS];
    ShortReg pairs[ROWS][REGS];
    UNROLL_FOR (int row = 0; row < ROWS; row++)
        UNROLL_FOR (int reg = 0; reg < REGS; reg++) dots[row][reg] = Dot::start(groups[row]->minus_sums + half);
    UNROLL_FOR (unsigned at = 0; at < part_elems; at += 4)
        UNROLL_FOR (int reg = 0; reg < REGS; reg++) {
            Int8Reg weights = Dot::load(TileSource{tile, reg}, number + at / LANES * LANES, at % LANES);
            UNROLL_FOR (int row = 0; row < ROWS; row++)
                dots[row][reg] =
                    Dot::step(dots[row][reg], pairs[row][reg], at / 4, weights, groups[row]->codes + in_group + at);
        }
    UNROLL_FOR (int reg = 0; reg < REGS; reg++) {
        const TileSource source = {tile, reg};
        const FloatReg scale = Format::scale(source, number / part_elems);
        FloatReg minimum = {};
        if constexpr (Format::has_minimum) minimum = Format::minimum(source, number / part_elems);
        UNROLL_FOR (int row = 0; row < ROWS; row++) {
            const IntReg exact = Dot::finish(dots[row][reg], groups[row]->minus_sums + half);
            FloatReg &sum = sums[row][reg];
            sum = fma_reg(__builtin_convertvector(exact, FloatReg), scale * splat_reg(groups[row]->scale), sum);
            if constexpr (Format::has_minimum) sum = fma_reg(minimum, splat_reg(groups[row]->terms[half]), sum);
        }
    }
}

// out (ROWS, 16) = activations (ROWS, groups) @ panel^T.
template <int ROWS, class Format>
__attribute__((noinline)) void multiply_tile(float *out, const char *x, int64_t x_stride, const char *tile,
                                             int64_t num_groups) {
    constexpr int64_t tile_bytes = LANES * Format::num_bytes;
    FloatReg sums[ROWS][REGS] = {};
    // The CPU's prefetchers lose the track of superblocks, whose fields are far apart.
    constexpr bool prefetches = ROWS >= ROWS_TO_PREFETCH || Format::num_groups > 1;
    const char *ahead = tile + (Format::num_groups > 1 ? 2 * tile_bytes : AHEAD_BYTES);
    for (int64_t at = 0; at < num_groups; tile += tile_bytes) {
        for (unsigned group = 0; group < Format::num_groups; group++, at++, ahead += tile_bytes / Format::num_groups) {
            if constexpr (prefetches)
                UNROLL_FOR (int line = 0; line < tile_bytes / Format::num_groups; line += 64) prefetch(ahead + line);
            const ActivationGroup *groups[ROWS];
            UNROLL_FOR (int row = 0; row < ROWS; row++) groups[row] = (const ActivationGroup *)(x + x_stride * row) + at;
            add_part<ROWS, Format>(sums, tile, groups, GROUP * group);
            if constexpr (Format::num_parts == 2) add_part<ROWS, Format>(sums, tile, groups, GROUP * group + GROUP / 2);
        }
    }
    memcpy(out, sums, sizeof sums);
}

// Returns how many rows it multiplied, at most ROWS.
template <class Format, int ROWS = TALLEST>
int64_t multiply_rows(float *out, const char *x, int64_t x_stride, int64_t rows, const char *panel, int64_t num_groups) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_rows<Format, ROWS == 12 ? 8 : ROWS / 2>(out, x, x_stride, rows, panel, num_groups);
    return multiply_tile<ROWS, Format>(out, x, x_stride, panel, num_groups), ROWS;
}

// Up to sixteen outputs from `first` on as an interleaved panel, in scratch memory where they do not lie so.
template <class Format>
const char *panel_of(const tw_linear_args &args, int64_t first, int64_t num_outputs) {
    const int64_t num_blocks = args.num_inputs / GROUP / Format::num_groups;
    const char *panel = (const char *)args.weight + args.weight_stride * first;
    if (is_interleaved(args.weight_kind) && num_outputs == LANES) return panel;
    char *scratch = (char *)thread_scratch(WIDENED_WEIGHTS, LANES * Format::num_bytes * num_blocks / 4 + 1);
    interleave_rows<Format>(scratch, panel, args.weight_stride, num_outputs, num_blocks);
    return scratch;
}

#if defined(__AMX_INT8__)
// A part of a group of sixteen outputs. Codes less the offset are a tile: four of each output, then the next four.
template <class Format>
struct TilePart {
    static constexpr unsigned elems = GROUP / Format::num_parts;
    FloatReg scale, minimum;
    Int8Reg codes[elems / 4];
};

template <class Format>
void make_parts(TilePart<Format> *part, const char *tile, int64_t num_groups) {
    constexpr unsigned elems = TilePart<Format>::elems;
    for (; num_groups > 0; num_groups -= Format::num_groups, tile += LANES * Format::num_bytes)
        for (unsigned number = 0; number < GROUP * Format::num_groups; number += elems, part++) {
            const TileSource source = {tile, 0};
            part->scale = Format::scale(source, number / elems);
            if constexpr (Format::has_minimum) part->minimum = Format::minimum(source, number / elems);
            UNROLL_FOR (unsigned at = 0; at < elems; at += 4)
                part->codes[at / 4] =
                    load_weights<Format>(source, number + at / LANES * LANES, at % LANES) - (int8_t)Format::offset;
        }
}

// out (16, 16) = activations (16, groups) @ parts^T. The sums of a part are exact, so the bits are those of multiply_tile.
template <class Format>
__attribute__((noinline)) void multiply_sixteen(float *out, const char *x, int64_t x_stride, const TilePart<Format> *part,
                                                int64_t num_groups) {
    FloatReg sums[LANES] = {};
    int64_t three = 3 * x_stride, four = 4 * x_stride, twelve = 12 * x_stride;
    __asm__("" : "+r"(three), "+r"(four), "+r"(twelve));  // else GCC keeps sixteen addresses, more than there are registers
    for (; num_groups > 0; num_groups--, x += sizeof(ActivationGroup))
        UNROLL_FOR (int half = 0; half < Format::num_parts; half++, part++) {
            IntReg dots[LANES];
            _tile_zero(0);
            _tile_loadd(1, x + LANES * half, x_stride);
            _tile_loadd(2, part->codes, 64);
            _tile_dpbssd(0, 1, 2);
            _tile_stored(0, dots, 64);
            UNROLL_FOR (int row = 0; row < LANES; row++) {
                const char *quad = row / 4 == 3 ? x + twelve : x + four * (row / 4);
                const ActivationGroup *group = (const ActivationGroup *)(quad + (row % 4 == 3 ? three : x_stride * (row % 4)));
                const FloatReg scale = part->scale * splat_reg(group->scale);
                sums[row] = fma_reg(__builtin_convertvector(dots[row], FloatReg), scale, sums[row]);
                if constexpr (Format::has_minimum)
                    sums[row] = fma_reg(part->minimum, splat_reg(group->terms[Format::num_parts == 2 ? half : 2]), sums[row]);
            }
        }
    memcpy(out, sums, sizeof sums);
}

// Whole sixteens of rows; returns how many they are: 0 for few, where it takes as long or longer.
template <class Format>
int64_t multiply_in_units(const tw_linear_args &args, int64_t start, int64_t stop) {
    using Part = TilePart<Format>;
    const int64_t num_groups = args.num_inputs / GROUP, num_parts = num_groups * Format::num_parts;
    const int64_t num_rows = args.num_tokens / LANES * LANES;
    if (num_rows < (Format::num_groups > 1 ? LANES : 4 * LANES)) return 0;
    Part *parts = (Part *)thread_scratch(WEIGHT_TILES, PANEL / LANES * num_parts * sizeof(Part) / 4);
    alignas(64) uint8_t shapes[64] = {1};  // of sums, x and weights: bytes of a row from 16 on, rows from 48 on
    shapes[16] = shapes[20] = 64, shapes[18] = Part::elems, shapes[48] = shapes[49] = LANES, shapes[50] = Part::elems / 4;
    _tile_loadconfig(shapes);
    Part *own = parts;
    for (int64_t first = start; first < stop; first += LANES, own += num_parts)
        make_parts(own, panel_of<Format>(args, first, least(LANES, stop - first)), num_groups);
    for (int64_t token = 0; token < num_rows; token += LANES)
        for (int64_t first = start; first < stop; first += LANES) {
            alignas(64) float sums[LANES * LANES];
            own = parts + (first - start) / LANES * num_parts;
            multiply_sixteen(sums, (const char *)args.x + args.x_stride * token, args.x_stride, own, num_groups);
            write_sums<LANES>(args, sums, LANES, least(LANES, stop - first), token, first);
        }
    _tile_release();
    return num_rows;
}
#endif

}  // namespace

int64_t quantized_bytes(int64_t depth) { return depth / GROUP * sizeof(ActivationGroup); }

void quantize_rows(char *target, const char *x, int64_t x_stride, int64_t num_rows, int64_t depth, int64_t kind) {
    with_kind(kind, [&]<class Number>(Number) {
        ActivationGroup *group = (ActivationGroup *)target;
        for (int64_t row = 0; row < num_rows; row++)
            for (int64_t at = 0; at < depth; at += GROUP)
                quantize_group<Number>(group++, x + x_stride * row + Number::size * at);
    });
}

void multiply_int8(const tw_linear_args &args, int64_t start, int64_t stop) {
    with_packed(args.weight_kind, [&]<class Format>(Format) {
        for (int64_t first = start, end; first < stop; first = end) {
            end = least(first + PANEL, stop);
            int64_t done = 0;  // rows
#if defined(__AMX_INT8__)
            done = multiply_in_units<Format>(args, first, end);
#endif
            for (int64_t at = first; at < end && done < args.num_tokens; at += LANES) {
                const int64_t count = least(LANES, end - at);
                const char *panel = panel_of<Format>(args, at, count);
                for (int64_t token = done, step; token < args.num_tokens; token += step) {
                    alignas(64) float sums[TALLEST * LANES];
                    const char *x = (const char *)args.x + args.x_stride * token;
                    step =
                        multiply_rows<Format>(sums, x, args.x_stride, args.num_tokens - token, panel, args.num_inputs / GROUP);
                    write_sums<LANES>(args, sums, step, count, token, at);
                }
            }
        }
    });
}
