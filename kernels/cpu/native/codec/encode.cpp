// Encoding of numbers as codes, scales and zeros (codec.h).
//
// Encoding makes three passes over blocks in the first-level cache: numbers are widened, rotated if the format says so, and what
// earlier sums lost is added; all scales of a block are computed at once; codes are rounded and packed, and what they lose is
// stored. One pass would wait: a group's scale depends on all of its numbers by a chain of a hundred cycles.
#include "codec.h"

namespace {
constexpr int MAX_GROUPS = BLOCK / 32;
constexpr float FLOAT8_MAX = 448.0f, MIN_SCALE = 0x1p-126f, INFINITE = __builtin_inff();
constexpr uint32_t LARGEST_BF16 = 0x7F7F;

// Whole groups, of which the last may be filled up, and facts about each.
struct Block {
    alignas(64) float numbers[BLOCK];
    // Of symmetric formats, the number of the largest size: its size in the upper 31 bits, above infinity for NaN, and its sign in
    // the lowest bit. Of two of equal size and unlike sign, the negative one; -0 if all are zeros.
    alignas(64) int32_t largest[MAX_GROUPS] = {};
    alignas(64) float low[MAX_GROUPS] = {}, high[MAX_GROUPS] = {};  // of others; low is NaN if a number is infinite or NaN
    alignas(64) float scale[MAX_GROUPS], inverse[MAX_GROUPS], zero[MAX_GROUPS];
    uint32_t broken;  // a bit for each group that must decode to NaN
    int64_t num_groups;
};

template <int COUNT>
INLINE int32_t find_largest(const F32 (&x)[COUNT]) {
    I32 largest = splat_int(1);
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
        const I32 bits = bits_of(x[i]);
        largest = maximum_unsigned(largest, shift_left(bits, 1) | shift_right(bits, 31));
    }
    return max_lanes_unsigned(largest);
}
template <int COUNT>
INLINE void find_extremes(const F32 (&x)[COUNT], float &lowest, float &highest) {
    F32 low = splat(INFINITE), high = splat(-INFINITE), check = splat(0.0f);
    UNROLL_FOR (int i = 0; i < COUNT; i++) {
        low = minimum(x[i], low), high = maximum(x[i], high);
        check = fma(x[i], splat(0.0f), check);  // NaN from the first infinity or NaN on
    }
    lowest = min_lanes(low) + sum_lanes(check), highest = max_lanes(high);
}

// Numbers from `count` on become the one before them.
template <class Number, int COUNT>
INLINE void load_group(F32 (&x)[COUNT], const char *source, int64_t count) {
    if (count >= LANES * COUNT) {
        UNROLL_FOR (int i = 0; i < COUNT; i++) x[i] = Number::load(source + Number::size * LANES * i);
        return;
    }
    alignas(64) float numbers[LANES * COUNT];
    for (int64_t at = 0; at < count; at += LANES)
        store(numbers + at, load_numbers<Number>(source + Number::size * at, count - at));
    for (int64_t at = count; at < LANES * COUNT; at++) numbers[at] = numbers[count - 1];
    UNROLL_FOR (int i = 0; i < COUNT; i++) x[i] = load(numbers + LANES * i);
}

// `count` numbers, from `source` on, to `block`. `carried`: null, or what their codes of the sum before lost.
template <int SIZE, class Number, bool IS_SYMMETRIC>
__attribute__((noinline)) void fill_block(Block &block, const char *source, int64_t count, bool rotates, const char *carried) {
    constexpr int num_vectors = SIZE / LANES;
    block.num_groups = (count + SIZE - 1) / SIZE;
    for (int64_t group = 0; group < block.num_groups; group++) {
        const int64_t first = group * SIZE;
        F32 x[num_vectors];
        load_group<Number>(x, source + Number::size * first, count - first);
        if (rotates) rotate(x);
        if (carried)
            UNROLL_FOR (int i = 0; i < num_vectors; i++)
                x[i] = x[i] + BFloat16::load(carried + BFloat16::size * (first + LANES * i));
        if (IS_SYMMETRIC)
            block.largest[group] = find_largest(x);
        else
            find_extremes(x, block.low[group], block.high[group]);
        UNROLL_FOR (int i = 0; i < num_vectors; i++) store(block.numbers + first + LANES * i, x[i]);
    }
}

constexpr int32_t UPPER_HALF = (int32_t)0xFFFF0000;
// Of a number >= 0: the smallest bfloat16 that is not below.
INLINE F32 bf16_above(F32 value) { return floats_of((bits_of(value) + splat_int(0xFFFF)) & splat_int(UPPER_HALF)); }
// The largest bfloat16 that is not above.
INLINE F32 bf16_below(F32 value) {
    const I32 bits = bits_of(value), is_negative = bits < splat_int(0);
    return floats_of((bits + (is_negative & splat_int(0xFFFF))) & splat_int(UPPER_HALF));
}

// Chooses the scales and zeros of all groups, and writes those of the message from `group` on. `top`: the largest code, or of a
// symmetric format the number of levels on one side, a power of two.
template <bool IS_SYMMETRIC>
__attribute__((noinline)) void scale_block(Block &block, const Message &message, int64_t group, float top) {
    block.broken = 0;
    for (int64_t at = 0; at < block.num_groups; at += LANES) {
        F32 scale, zero = splat(0.0f);
        I32 is_sound;
        if (IS_SYMMETRIC) {
            const I32 largest = bits_of(load(block.largest + at)), size = shift_right(largest, 1);
            is_sound = size < splat_int((LARGEST_BF16 << 16) + 1);
            scale = bf16_above(maximum(floats_of(size) * splat(1.0f / top), splat(MIN_SCALE)));
            // The number of the largest size gets the lowest level, which has no counterpart.
            scale = floats_of(bits_of(scale) | shift_left(largest + splat_int(1), 31));
        } else {
            const F32 low = load(block.low + at), high = load(block.high + at);
            F32 span = maximum(high, -low);
            if (message.has_zeros) {
                zero = bf16_below(low + splat(0.0f));
                span = high - zero;
            }
            scale = bf16_above(maximum(span / splat(top), splat(MIN_SCALE)));
            is_sound = (low == low) & (splat(top) * scale + zero < splat(INFINITE));
        }
        store(block.inverse + at, splat(1.0f) / scale);
        scale = select(is_sound, scale, splat(__builtin_nanf(""))), zero = select(is_sound, zero, splat(0.0f));
        store(block.scale + at, scale), store(block.zero + at, zero);
        const int64_t left = block.num_groups - at;
        const uint32_t kept = left < LANES ? (1u << left) - 1 : 0xFFFF;
        block.broken |= (~mask_of(is_sound) & kept) << at;
        // Exact but for NaN, which becomes 0x7FC0.
        store_numbers<BFloat16>(message.scales + 2 * (group + at), scale, left);
        if (message.has_zeros) store_numbers<BFloat16>(message.zeros + 2 * (group + at), zero, left);
    }
}

// What codes lost, as bfloat16. Sizes below the least normal number become 0, as AVX512-BF16 rounds them.
INLINE void store_lost(char *target, F32 lost) {
    if (!PAIRS) {
        const I32 is_tiny = floats_of(bits_of(lost) & splat_int(0x7FFFFFFF)) < splat(MIN_SCALE);
        lost = select(is_tiny, lost * splat(0.0f), lost);
    }
    BFloat16::store_rounded(target, lost);
}

// Rounds a block's numbers and writes the codes of its groups, in the message from `group` on; what they lose, to `carried`.
template <class Shape, bool IS_SYMMETRIC>
__attribute__((noinline)) void store_block(const Block &block, const Message &message, int64_t group, char *carried) {
    constexpr bool HAS_ZEROS = !IS_SYMMETRIC && !Shape::is_float8;
    for (int64_t at = 0; at < block.num_groups; at++) {
        const float *numbers = block.numbers + at * Shape::size;
        const F32 scale = splat(block.scale[at]), inverse = splat(block.inverse[at]), zero = splat(block.zero[at]);
        const F32 to_code = splat(ROUND_TO_INTEGER + (IS_SYMMETRIC ? (float)Shape::num_levels : 0.0f));
        I32 codes[Shape::num_vectors];
        UNROLL_FOR (int i = 0; i < Shape::num_vectors; i++) {
            const F32 x = load(numbers + LANES * i);
            F32 scaled = (IS_SYMMETRIC ? x : x - zero) * inverse;
            // Only the end without a level of its own must be clamped: the roundings of the scale's inverse and of the
            // product stay below half a step.
            if (IS_SYMMETRIC) scaled = minimum(scaled, splat(Shape::num_levels - 1.0f));
            const F32 shifted = scaled + to_code;
            codes[i] = Shape::is_float8 ? to_e4m3(scaled) : bits_of(shifted);
            if (carried) {
                const F32 level = Shape::is_float8 ? from_e4m3(codes[i]) : shifted - to_code;
                const F32 lost = HAS_ZEROS ? x - fma(level, scale, zero) : fma(-level, scale, x);
                store_lost(carried + BFloat16::size * (at * Shape::size + LANES * i), lost);
            }
        }
        if (block.broken >> at & 1)
            UNROLL_FOR (int i = 0; i < Shape::num_vectors; i++) codes[i] = splat_int(0);
        typename Shape::CodePlanes(message.planes, message.num_groups, group + at).store(codes);
    }
}

// EncodeBlock, of numbers of any kind.
template <class Shape, class Number>
__attribute__((noinline)) void encode_block(const Message &message, int64_t group, const char *source, int64_t count,
                                            bool rotates, char *carried) {
    Block block;
    if (message.format.symmetric && !Shape::is_float8) {
        fill_block<Shape::size, Number, true>(block, source, count, rotates, carried);
        scale_block<true>(block, message, group, Shape::num_levels);
        return store_block<Shape, true>(block, message, group, carried);
    }
    fill_block<Shape::size, Number, false>(block, source, count, rotates, carried);
    scale_block<false>(block, message, group, Shape::is_float8 ? FLOAT8_MAX : Shape::max_code);
    store_block<Shape, false>(block, message, group, carried);
}
}  // namespace

EncodeBlock block_encoder(const tw_block_format &format) {
    return with_shape(format, []<class Shape>(Shape) -> EncodeBlock { return encode_block<Shape, Float32>; });
}

void tw_encode(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    with_shape(args.format, [&]<class Shape>(Shape) {
        const Message message(args.message, args.format, args.num_elems);
        const int64_t end = least(stop * Shape::size, args.num_elems);
        with_kind(args.kind, [&]<class Number>(Number) {
            for (int64_t first = start * Shape::size; first < end; first += BLOCK) {
                const char *source = (const char *)args.numbers + Number::size * first;
                const int64_t count = least(end - first, BLOCK);
                char *carried = carried_at(args.carried, first);
                encode_block<Shape, Number>(message, first / Shape::size, source, count, args.format.hadamard, carried);
            }
        });
    });
}
