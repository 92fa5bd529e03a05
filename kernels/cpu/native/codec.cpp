// The block codec: the bytes of kernels/spec/block_quant.py, which has the arithmetic; block_format.py has the layout.
//
// Encoding makes three passes over blocks in the first-level cache: numbers are widened, rotated if the format says so, and what
// earlier sums lost is added; all scales of a block are computed at once; codes are rounded and packed, and what they lose is
// stored. One pass would wait: a group's scale depends on all of its numbers by a chain of a hundred cycles. Decoding keeps a
// group in registers.
#include "kernels.h"
#include "planes.h"

constexpr int64_t MAX_GROUP = 128;  // a whole number of groups of every format
constexpr float FLOAT8_MAX = 448.0f, MIN_SCALE = 0x1p-126f, INFINITE = __builtin_inff();
constexpr uint32_t NAN_BF16 = 0x7FC0, INFINITE_BF16 = 0x7F80, LARGEST_BF16 = 0x7F7F;

// Two planes: low bits first, then those that are left, if any.
template <int BITS, int SIZE, bool IS_FLOAT8 = false>
struct Shape {
    static constexpr int bits = BITS, size = SIZE, num_vectors = SIZE / LANES;
    static constexpr bool is_float8 = IS_FLOAT8;
    static constexpr int low_bits = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, high_bits = BITS - low_bits;
    static constexpr int max_code = (1 << BITS) - 1, num_levels = 1 << (BITS - 1);
};

// An encoded tensor: its sections. Each has a group's part `group` parts behind its start.
struct Message {
    tw_block_format format;
    int64_t num_groups;
    bool has_zeros;
    char *low_plane, *high_plane, *scales, *zeros;

    Message(address start, const tw_block_format &format, int64_t num_elems)
        : format(format), num_groups((num_elems + format.group_elems - 1) / format.group_elems) {
        const int64_t low_bits = format.bits == 8 ? 8 : format.bits >= 4 ? 4 : 2, eighth = format.group_elems / 8;
        has_zeros = !format.symmetric && !format.float8;
        low_plane = (char *)start;
        high_plane = low_plane + num_groups * eighth * low_bits;
        scales = low_plane + num_groups * eighth * format.bits;
        zeros = scales + 2 * num_groups;
    }
};

INLINE uint32_t load_u16(const char *source) {
    uint16_t value;
    memcpy(&value, source, sizeof value);
    return value;
}
INLINE float from_bf16(uint32_t bits) { return float_of(bits << 16); }

// --- rotation -------------------------------------------------------------------------------------------------------

template <int... LANE>
struct Lanes {};
template <int COUNT, int... LANE>
struct FirstLanes : FirstLanes<COUNT - 1, COUNT - 1, LANE...> {};
template <int... LANE>
struct FirstLanes<0, LANE...> {
    using type = Lanes<LANE...>;
};
using RegLanes = FirstLanes<REG_LANES>;
// Each lane's value goes to the lane STEP apart.
template <int STEP, int... LANE>
INLINE FloatReg partners(FloatReg value, Lanes<LANE...>) {
    return __builtin_shufflevector(value, value, (LANE ^ STEP)...);
}
// a + b and a - b of lanes STEP apart, all over the vector.
template <int STEP>
INLINE F32 butterfly(F32 value) {
    F32 out;
    if constexpr (STEP >= REG_LANES) {
        constexpr int apart = STEP / REG_LANES;
        for (int i = 0; i < REGS; i++) {
            const int first = i & ~apart, second = i | apart;
            out.reg[i] = i == first ? value.reg[first] + value.reg[second] : value.reg[first] - value.reg[second];
        }
    } else {
        FloatReg signs;
        for (int lane = 0; lane < REG_LANES; lane++) signs[lane] = lane & STEP ? -1.0f : 1.0f;
        for (int i = 0; i < REGS; i++)
            out.reg[i] = fma_reg(value.reg[i], signs, partners<STEP>(value.reg[i], RegLanes::type()));
    }
    return out;
}

// A group times the Hadamard matrix of its size: entries 1 and -1, not scaled.
template <int COUNT>
INLINE void rotate(F32 (&x)[COUNT]) {
    constexpr int rounds = COUNT == 8 ? 3 : COUNT == 4 ? 2 : 1;
    UNROLL for (int i = 0; i < COUNT; i++)
        x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(x[i]))));
    UNROLL for (int round = 0; round < rounds; round++) {
        const int apart = 1 << round;
        UNROLL for (int i = 0; i < COUNT; i++) {
            if (i & apart) continue;
            F32 a = x[i], b = x[i + apart];
            x[i] = a + b, x[i + apart] = a - b;
        }
    }
}

// --- blocks to bytes --------------------------------------------------------------------------------------------------

constexpr int BLOCK = 1024, MAX_GROUPS = BLOCK / 32;

// Whole groups, of which the last may be filled up, and facts about each.
struct Block {
    alignas(64) float numbers[BLOCK];
    // The number of the largest size: its size in the upper 31 bits, above infinity for NaN, and its sign in the lowest bit. Of
    // two of equal size and unlike sign, the negative one; -0 if all are zeros. For symmetric formats, the others have:
    alignas(64) int32_t largest[MAX_GROUPS] = {};
    alignas(64) float low[MAX_GROUPS] = {}, high[MAX_GROUPS] = {};  // low is NaN if a number is infinite or NaN
    alignas(64) float scale[MAX_GROUPS], inverse[MAX_GROUPS], zero[MAX_GROUPS];
    uint32_t broken;  // a bit for each group that must decode to NaN
    int64_t num_groups;
};

template <int COUNT>
INLINE int32_t find_largest(const F32 (&x)[COUNT]) {
    I32 largest = splat_int(1);
    UNROLL for (int i = 0; i < COUNT; i++) {
        const I32 bits = bits_of(x[i]);
        largest = maximum_unsigned(largest, shift_left(bits, 1) | shift_right(bits, 31));
    }
    return max_lanes_unsigned(largest);
}
template <int COUNT>
INLINE void find_extremes(const F32 (&x)[COUNT], float &lowest, float &highest) {
    F32 low = splat(INFINITE), high = splat(-INFINITE), check = splat(0.0f);
    UNROLL for (int i = 0; i < COUNT; i++) {
        low = minimum(x[i], low), high = maximum(x[i], high);
        check = fma(x[i], splat(0.0f), check);  // NaN from the first infinity or NaN on
    }
    lowest = min_lanes(low) + sum_lanes(check), highest = max_lanes(high);
}

// Numbers from `count` on become the one before them.
template <class Number, int COUNT>
INLINE void load_group(F32 (&x)[COUNT], const char *source, int64_t count) {
    if (count >= LANES * COUNT) {
        UNROLL for (int i = 0; i < COUNT; i++)
            x[i] = Number::load(source + Number::size * LANES * i);
        return;
    }
    alignas(64) float numbers[LANES * COUNT];
    for (int64_t at = 0; at < count; at += LANES)
        store(numbers + at, load_numbers<Number>(source + Number::size * at, count - at));
    for (int64_t at = count; at < LANES * COUNT; at++) numbers[at] = numbers[count - 1];
    UNROLL for (int i = 0; i < COUNT; i++)
        x[i] = load(numbers + LANES * i);
}

// `count` numbers, from `source` on, to `block`. `carried`: null, or what their codes of the sum before lost.
template <class Shape, class Number, bool IS_SYMMETRIC>
static __attribute__((noinline)) void fill_block(Block &block, const char *source, int64_t count, bool rotates,
                                                 const char *carried) {
    block.num_groups = (count + Shape::size - 1) / Shape::size;
    for (int64_t group = 0; group < block.num_groups; group++) {
        const int64_t first = group * Shape::size;
        F32 x[Shape::num_vectors];
        load_group<Number>(x, source + Number::size * first, count - first);
        if (rotates) rotate(x);
        if (carried) {
            UNROLL for (int i = 0; i < Shape::num_vectors; i++)
                x[i] = x[i] + BFloat16::load(carried + BFloat16::size * (first + LANES * i));
        }
        if (IS_SYMMETRIC) {
            block.largest[group] = find_largest(x);
        } else {
            find_extremes(x, block.low[group], block.high[group]);
        }
        UNROLL for (int i = 0; i < Shape::num_vectors; i++)
            store(block.numbers + first + LANES * i, x[i]);
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

// Chooses the scales and zeros of all groups, and writes those of the message from `group` on.
template <class Shape, bool IS_SYMMETRIC>
static __attribute__((noinline)) void scale_block(Block &block, const Message &message, int64_t group) {
    block.broken = 0;
    for (int64_t at = 0; at < block.num_groups; at += LANES) {
        F32 scale, zero = splat(0.0f);
        I32 is_sound;
        if (IS_SYMMETRIC) {
            constexpr float levels = (float)Shape::num_levels;  // a power of two
            const I32 largest = load_ints(block.largest + at), size = shift_right(largest, 1);
            is_sound = size < splat_int((LARGEST_BF16 << 16) + 1);
            scale = bf16_above(maximum(floats_of(size) * splat(1.0f / levels), splat(MIN_SCALE)));
            // The number of the largest size gets the lowest level, which has no counterpart.
            scale = floats_of(bits_of(scale) | shift_left(largest + splat_int(1), 31));
        } else {
            const F32 low = load(block.low + at), high = load(block.high + at);
            F32 span = maximum(high, -low), top = splat(FLOAT8_MAX);
            if (message.has_zeros) {
                zero = bf16_below(low + splat(0.0f));
                span = high - zero, top = splat((float)Shape::max_code);
            }
            scale = bf16_above(maximum(span / top, splat(MIN_SCALE)));
            is_sound = (low == low) & (top * scale + zero < splat(INFINITE));
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
static __attribute__((noinline)) void store_block(const Block &block, const Message &message, int64_t group, char *carried) {
    using Low = Plane<Shape::low_bits, Shape::size>;
    using High = Plane<Shape::high_bits ? Shape::high_bits : 8, Shape::size>;
    constexpr bool HAS_ZEROS = !IS_SYMMETRIC && !Shape::is_float8;
    char *low_plane = message.low_plane + group * Low::bytes, *high_plane = message.high_plane + group * High::bytes;
    for (int64_t at = 0; at < block.num_groups; at++) {
        const bool is_broken = block.broken >> at & 1;
        const float *numbers = block.numbers + at * Shape::size;
        const F32 scale = splat(block.scale[at]), inverse = splat(block.inverse[at]), zero = splat(block.zero[at]);
        const F32 to_code = splat(ROUND_TO_INTEGER + (IS_SYMMETRIC ? (float)Shape::num_levels : 0.0f));
        I32 codes[Shape::num_vectors];
        UNROLL for (int i = 0; i < Shape::num_vectors; i++) {
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
        if (is_broken) {
            UNROLL for (int i = 0; i < Shape::num_vectors; i++)
                codes[i] = splat_int(0);
        }
        Low::store(low_plane + at * Low::bytes, codes, 0, Shape::high_bits == 0);
        if constexpr (Shape::high_bits > 0) High::store(high_plane + at * High::bytes, codes, Shape::low_bits, true);
    }
}

// Encodes `count` numbers, at most BLOCK, as groups of the message from `group` on. `carried`: null, or of these groups.
template <class Shape, class Number>
static __attribute__((noinline)) void encode_block(const Message &message, int64_t group, const char *source, int64_t count,
                                                   bool rotates, char *carried) {
    Block block;
    if (message.format.symmetric && !Shape::is_float8) {
        fill_block<Shape, Number, true>(block, source, count, rotates, carried);
        scale_block<Shape, true>(block, message, group);
        return store_block<Shape, true>(block, message, group, carried);
    }
    fill_block<Shape, Number, false>(block, source, count, rotates, carried);
    scale_block<Shape, false>(block, message, group);
    store_block<Shape, false>(block, message, group, carried);
}

// --- one group from bytes -------------------------------------------------------------------------------------------

// A bfloat16 number that is finite and at least 2^-100 in size.
INLINE bool is_plain(uint32_t bits) { return (bits & 0x7FFF) >= 27 << 7 && (bits & 0x7FFF) < INFINITE_BF16; }

template <class Shape>
struct CodedGroup {
    using Low = Plane<Shape::low_bits, Shape::size>;
    using High = Plane<Shape::high_bits ? Shape::high_bits : 8, Shape::size>;
    const char *low_plane, *high_plane;
    uint32_t scale_bits, zero_bits;
    F32 scale, zero;
    I32 level;

    CodedGroup(const Message &message, int64_t group)
        : low_plane(message.low_plane + group * Low::bytes), high_plane(message.high_plane + group * High::bytes) {
        scale_bits = load_u16(message.scales + 2 * group);
        // Adding -0 changes nothing, not even a -0.
        zero_bits = message.has_zeros ? load_u16(message.zeros + 2 * group) : 0x8000;
        scale = splat(from_bf16(scale_bits)), zero = splat(from_bf16(zero_bits));
        level = splat_int(message.format.symmetric ? Shape::num_levels : 0);
    }
    F32 level_of(I32 code) const { return Shape::is_float8 ? from_e4m3(code) : to_float(code - level); }
    F32 number_of(I32 code) const { return fma(level_of(code), scale, zero); }
    // Of numbers `at` to `at + 15`.
    I32 codes(int at) const {
        I32 code = Low::load(low_plane, at);
        if constexpr (Shape::high_bits > 0) code = code | shift_left(High::load(high_plane, at), Shape::low_bits);
        return code;
    }
    F32 numbers(int at) const { return number_of(codes(at)); }
    // Whether AVX512-BF16, which takes subnormal numbers for zero, rounds all numbers rightly: with scale and zero of
    // 8 bits of mantissa and at least 2^-100, or a zero of 0, no number but 0 is below 2^-116.
    bool rounds_exactly() const {
        return !PAIRS || (is_plain(scale_bits) && (is_plain(zero_bits) || (zero_bits & 0x7FFF) == 0));
    }
};

// Numbers of a format that rotates, still rotated or turned back.
template <class Shape>
INLINE void decode_group(const Message &message, int64_t group, bool turns_back, F32 (&x)[Shape::num_vectors]) {
    constexpr int COUNT = Shape::num_vectors;
    const CodedGroup<Shape> coded(message, group);
    if (turns_back && message.format.symmetric) {
        // Sums of levels are whole numbers, so that scaling afterwards changes nothing.
        UNROLL for (int i = 0; i < COUNT; i++)
            x[i] = coded.level_of(coded.codes(LANES * i));
        rotate(x);
        const F32 scale = splat(from_bf16(coded.scale_bits) * (1.0f / Shape::size));
        UNROLL for (int i = 0; i < COUNT; i++)
            x[i] = x[i] * scale;
        return;
    }
    UNROLL for (int i = 0; i < COUNT; i++)
        x[i] = coded.numbers(LANES * i);
    if (!turns_back) return;
    rotate(x);
    UNROLL for (int i = 0; i < COUNT; i++)
        x[i] = x[i] * splat(1.0f / Shape::size);
}

// A whole group without rotation straight to bfloat16.
template <class Shape>
INLINE void decode_to_bf16(const CodedGroup<Shape> &coded, char *target) {
#if defined(__AVX512BF16__)
    if constexpr (Shape::bits == 4 && Shape::size >= 64) {
        // Sixteen numbers at most: computed once, rounded, and looked up by code, 32 at a time.
        const __m512 all = (__m512)coded.number_of(lane_numbers()).reg[0];
        const __m512i table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(all));
        constexpr int bytes = Shape::size / 2;
        for (int at = 0; at < bytes; at += 2 * LANES) {
            __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(coded.low_plane + at)));
            _mm512_storeu_si512(target + 2 * at, _mm512_permutexvar_epi16(pairs, table));
            pairs = _mm512_srli_epi16(pairs, 4);
            _mm512_storeu_si512(target + 2 * (bytes + at), _mm512_permutexvar_epi16(pairs, table));
        }
        return;
    }
    UNROLL for (int at = 0; at < Shape::size; at += 2 * LANES) {
        F32 first = coded.numbers(at), second = coded.numbers(at + LANES);
        __m512i narrow = (__m512i)_mm512_cvtne2ps_pbh((__m512)second.reg[0], (__m512)first.reg[0]);
        _mm512_storeu_si512(target + 2 * at, narrow);
    }
#else
    UNROLL for (int at = 0; at < Shape::size; at += LANES)
        BFloat16::store(target + 2 * at, coded.numbers(at));
#endif
}

// --- tensors --------------------------------------------------------------------------------------------------------

template <int BITS, bool IS_FLOAT8, class Work>
INLINE auto with_size(int64_t size, Work work) {
    if (size == 128) return work(Shape<BITS, 128, IS_FLOAT8>());
    if (size == 64) return work(Shape<BITS, 64, IS_FLOAT8>());
    return work(Shape<BITS, 32, IS_FLOAT8>());
}
// Calls `work` with the Shape of a format known at run time.
template <class Work>
INLINE auto with_shape(const tw_block_format &format, Work work) {
    if (format.float8) return with_size<8, true>(format.group_elems, work);
    switch (format.bits) {
        case 8: return with_size<8, false>(format.group_elems, work);
        case 6: return with_size<6, false>(format.group_elems, work);
        case 5: return with_size<5, false>(format.group_elems, work);
        case 4: return with_size<4, false>(format.group_elems, work);
        case 3: return with_size<3, false>(format.group_elems, work);
        default: return with_size<2, false>(format.group_elems, work);
    }
}

INLINE char *carried_at(address carried, int64_t first) { return carried ? (char *)carried + BFloat16::size * first : nullptr; }

template <class Shape>
static void encode_groups(const tw_code_args &args, int64_t start, int64_t stop) {
    const Message message(args.message, args.format, args.num_elems);
    const int64_t end = stop * Shape::size < args.num_elems ? stop * Shape::size : args.num_elems;
    with_kind(args.kind, [&](auto number) {
        using Number = decltype(number);
        for (int64_t first = start * Shape::size; first < end; first += BLOCK) {
            const char *source = (const char *)args.numbers + Number::size * first;
            const int64_t count = end - first < BLOCK ? end - first : BLOCK;
            char *carried = carried_at(args.carried, first);
            encode_block<Shape, Number>(message, first / Shape::size, source, count, args.format.hadamard, carried);
        }
    });
}

void tw_encode(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    with_shape(args.format, [&](auto shape) { encode_groups<decltype(shape)>(args, start, stop); });
}

template <class Shape, class Number>
static void decode_groups(const tw_code_args &args, int64_t start, int64_t stop) {
    const Message message(args.message, args.format, args.num_elems);
    for (int64_t group = start; group < stop; group++) {
        const int64_t first = group * Shape::size, left = args.num_elems - first;
        char *target = (char *)args.numbers + Number::size * first;
        bool rounds_exactly = false;
        if constexpr (Number::kind == BFLOAT16) {
            const CodedGroup<Shape> coded(message, group);
            rounds_exactly = coded.rounds_exactly() && (args.format.symmetric || !args.format.hadamard);
            if (rounds_exactly && !args.format.hadamard && left >= Shape::size) {
                decode_to_bf16(coded, target);
                continue;
            }
        }
        F32 x[Shape::num_vectors];
        decode_group<Shape>(message, group, args.format.hadamard, x);
        if (rounds_exactly && left >= Shape::size) {
            UNROLL for (int i = 0; i < Shape::num_vectors; i++)
                Number::store_rounded(target + Number::size * LANES * i, x[i]);
            continue;
        }
        UNROLL for (int i = 0; i < Shape::num_vectors; i++) {
            if (LANES * i < left) store_numbers<Number>(target + Number::size * LANES * i, x[i], left - LANES * i);
        }
    }
}

void tw_decode(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    with_shape(args.format, [&](auto shape) {
        with_kind(args.kind, [&](auto number) { decode_groups<decltype(shape), decltype(number)>(args, start, stop); });
    });
}

typedef void (*DecodeGroup)(const Message &, int64_t group, bool turns_back, float *sums, bool adds);
typedef void (*EncodeBlock)(const Message &, int64_t group, const float *sums, int64_t count, bool rotates, char *carried);

// Stores a group's numbers, or adds them to those of an earlier message.
template <class Shape>
static void decode_to_sums(const Message &message, int64_t group, bool turns_back, float *sums, bool adds) {
    F32 x[Shape::num_vectors];
    decode_group<Shape>(message, group, turns_back, x);
    UNROLL for (int i = 0; i < Shape::num_vectors; i++)
        store(sums + LANES * i, adds ? load(sums + LANES * i) + x[i] : x[i]);
}
template <class Shape>
static void encode_sums(const Message &message, int64_t group, const float *sums, int64_t count, bool rotates, char *carried) {
    encode_block<Shape, Float32>(message, group, (const char *)sums, count, rotates, carried);
}
static DecodeGroup decoder(const tw_block_format &format) {
    return with_shape(format, [](auto shape) -> DecodeGroup { return decode_to_sums<decltype(shape)>; });
}
static EncodeBlock encoder(const tw_block_format &format) {
    return with_shape(format, [](auto shape) -> EncodeBlock { return encode_sums<decltype(shape)>; });
}

void tw_decode_add(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    const Message message(args.message, args.format, args.num_elems);
    const DecodeGroup decode = decoder(args.format);
    const int64_t size = args.format.group_elems;
    alignas(64) float numbers[MAX_GROUP];
    for (int64_t group = start; group < stop; group++) {
        float *sums = (float *)args.numbers + group * size;
        const int64_t left = args.num_elems - group * size;
        if (left >= size) {
            decode(message, group, args.format.hadamard, sums, true);
            continue;
        }
        decode(message, group, args.format.hadamard, numbers, false);
        for (int64_t at = 0; at < left; at++) sums[at] += numbers[at];
    }
}

void tw_decode_reduce_encode(const void *recode_args, int64_t start, int64_t stop) {
    const tw_recode_args &args = *(const tw_recode_args *)recode_args;
    const tw_block_format &format = args.format, &out_format = args.out_format;
    const DecodeGroup decode = decoder(format);
    const EncodeBlock encode = encoder(out_format);
    const int64_t size = format.group_elems, out_size = out_format.group_elems;
    const bool stay_rotated = format.hadamard && out_format.hadamard && size == out_size;
    const Message out(args.out, out_format, args.num_elems);
    const int64_t end = stop * MAX_GROUP < args.num_elems ? stop * MAX_GROUP : args.num_elems;
    alignas(64) float sums[BLOCK];
    for (int64_t first = start * MAX_GROUP; first < end; first += BLOCK) {
        const int64_t count = end - first < BLOCK ? end - first : BLOCK;
        const int64_t num_groups = (count + size - 1) / size;
        for (int64_t i = 0; i < args.num_messages; i++) {
            const Message message(((const address *)args.messages)[i], format, args.num_elems);
            for (int64_t at = 0; at < num_groups; at++)
                decode(message, first / size + at, format.hadamard && !stay_rotated, sums + at * size, i > 0);
        }
        // Numbers that are still rotated fill their groups.
        const int64_t kept = stay_rotated ? num_groups * size : count;
        encode(out, first / out_size, sums, kept, out_format.hadamard && !stay_rotated, carried_at(args.carried, first));
    }
}
