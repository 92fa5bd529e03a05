// The block codec: the bytes of kernels/spec/block_quant.py, which has the arithmetic; block_format.py has the layout.
//
// Of each group the numbers are made as float32, rotated if the format says so, and encoded; or decoded, turned back and
// stored. A format's bits and group size are template arguments, its other options are looked at once a group.
#include "kernels.h"
#include "numbers.h"

constexpr int64_t MAX_GROUP = 128;  // a whole number of groups of every format
constexpr float FLOAT8_MAX = 448.0f, MIN_SCALE = 0x1p-126f, INFINITE = __builtin_inff();
constexpr uint32_t NAN_BF16 = 0x7FC0, INFINITE_BF16 = 0x7F80, SIGN_BF16 = 0x8000;

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
INLINE void store_u16(char *target, uint32_t value) {
    const uint16_t low = (uint16_t)value;
    memcpy(target, &low, sizeof low);
}
INLINE float from_bf16(uint32_t bits) { return float_of(bits << 16); }

// --- bytes and lanes ------------------------------------------------------------------------------------------------

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint64_t TwoWords __attribute__((vector_size(LANES)));
typedef uint32_t FourWords __attribute__((vector_size(LANES)));

INLINE I32 widen(Bytes bytes) {
    I32 out;
#if defined(__AVX512F__)
    out.reg[0] = (IntReg)_mm512_maskz_cvtepu8_epi32(0xFFFF, (__m128i)bytes);
#elif defined(__AVX2__)
    out.reg[0] = (IntReg)_mm256_cvtepu8_epi32((__m128i)bytes);
    out.reg[1] = (IntReg)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)bytes, 8));
#else
    uint16x8_t low = vmovl_u8(vget_low_u8((uint8x16_t)bytes)), high = vmovl_u8(vget_high_u8((uint8x16_t)bytes));
    out.reg[0] = (IntReg)vmovl_u16(vget_low_u16(low)), out.reg[1] = (IntReg)vmovl_u16(vget_high_u16(low));
    out.reg[2] = (IntReg)vmovl_u16(vget_low_u16(high)), out.reg[3] = (IntReg)vmovl_u16(vget_high_u16(high));
#endif
    return out;
}
// The lower 8 bits of each lane.
INLINE Bytes low_bytes(I32 value) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_maskz_cvtepi32_epi8(0xFFFF, (__m512i)value.reg[0]);
#elif defined(__AVX2__)
    value = value & splat_int(0xFF);
    __m256i halves = _mm256_packus_epi32((__m256i)value.reg[0], (__m256i)value.reg[1]);
    halves = _mm256_permute4x64_epi64(halves, 0xD8);
    return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
#else
    uint16x8_t low = vcombine_u16(vmovn_u32((uint32x4_t)value.reg[0]), vmovn_u32((uint32x4_t)value.reg[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32((uint32x4_t)value.reg[2]), vmovn_u32((uint32x4_t)value.reg[3]));
    return (Bytes)vcombine_u8(vmovn_u16(low), vmovn_u16(high));
#endif
}

// A group's part of a plane has SIZE * BITS / 8 bytes. Number e is in byte e % bytes, at bit BITS * (e / bytes).
template <int BITS, int SIZE>
struct Plane {
    static constexpr int bytes = SIZE * BITS / 8, mask = (1 << BITS) - 1;
    static constexpr bool is_narrow = bytes < LANES;  // sixteen numbers share its bytes

    // Where the fields of numbers `at` to `at + 15` lie in their bytes.
    static I32 shifts(int at) {
        I32 first = splat_int(BITS * (at / bytes));
        return is_narrow ? shift_right(lane_numbers(), bytes == 8 ? 3 : 2) * splat_int(BITS) + first : first;
    }
    static I32 load(const char *plane, int at) {
        Bytes packed;
        if constexpr (is_narrow) {
            uint64_t few = 0;
            memcpy(&few, plane, bytes);
            packed = bytes == 8 ? (Bytes)(TwoWords{} + few) : (Bytes)(FourWords{} + (uint32_t)few);
        } else {
            memcpy(&packed, plane + at % bytes, sizeof packed);
        }
        I32 fields = shift_right(widen(packed), shifts(at));
        return !is_narrow && BITS * (at / bytes + 1) == 8 ? fields : fields & splat_int(mask);
    }
    // Bits `shift` to `shift + BITS` of each code. Bits above the code's may hold anything.
    static void store(char *plane, const I32 *codes, int shift, bool is_last) {
        constexpr int step = is_narrow ? LANES : bytes;
        UNROLL for (int byte = 0; byte < step; byte += LANES) {
            I32 packed = splat_int(0);
            UNROLL for (int at = byte; at < SIZE; at += step) {
                I32 field = shift ? shift_right(codes[at / LANES], shift) : codes[at / LANES];
                if (!is_last || is_narrow) field = field & splat_int(mask);
                packed = packed | shift_left(field, shifts(at));
            }
            Bytes out = low_bytes(packed);
            if constexpr (is_narrow) {
                uint64_t few = ((TwoWords)out)[0] | ((TwoWords)out)[1];
                if (bytes == 4) few |= few >> 32;
                memcpy(plane, &few, bytes);
            } else {
                memcpy(plane + byte, &out, sizeof out);
            }
        }
    }
};

// --- e4m3 floats ----------------------------------------------------------------------------------------------------

// The nearest, ties to even, for numbers from -448 to 448. Down to 2^-6 the exponent's bias goes from 127 to 7 and 20 bits of
// mantissa are rounded off; below, codes count steps of 2^-9, the value of the lowest bit of 2^14.
INLINE I32 to_e4m3(F32 value) {
    I32 bits = bits_of(value), size = bits & splat_int(0x7FFFFFFF);
    I32 sign = shift_right(bits, 24) & splat_int(0x80);
    I32 odd = shift_right(size, 20) & splat_int(1);
    I32 normal = shift_right(size + splat_int(0x7FFFF - (120 << 23)) + odd, 20);
    I32 small = bits_of(floats_of(size) + splat(0x1p14f)) - splat_int((127 + 14) << 23);
    return select(size < splat_int((127 - 6) << 23), small, normal) | sign;
}
// Exact: the bits where float32 has them are the number divided by 2^120, subnormal or not.
INLINE F32 from_e4m3(I32 code) {
    I32 size = shift_left(code & splat_int(0x7F), 20), sign = shift_left(code & splat_int(0x80), 24);
    F32 value = floats_of(size | sign) * splat(0x1p120f);
    return select(size == splat_int(0x7F << 20), splat(__builtin_nanf("")), value);
}

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
        for (int i = 0; i < REGS; i++) out.reg[i] = value.reg[i] * signs + partners<STEP>(value.reg[i], RegLanes::type());
    }
    return out;
}

template <int COUNT>
static void rotate_vectors(float *numbers, float factor) {
    constexpr int rounds = COUNT == 8 ? 3 : COUNT == 4 ? 2 : 1;
    F32 x[COUNT];
    UNROLL for (int i = 0; i < COUNT; i++)
        x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(numbers + LANES * i)))));
    UNROLL for (int round = 0; round < rounds; round++) {
        const int apart = 1 << round;
        UNROLL for (int i = 0; i < COUNT; i++) {
            if (i & apart) continue;
            F32 a = x[i], b = x[i + apart];
            x[i] = a + b, x[i + apart] = a - b;
        }
    }
    UNROLL for (int i = 0; i < COUNT; i++) store(numbers + LANES * i, x[i] * splat(factor));
}
// A group times the Hadamard matrix of its size: entries 1 and -1, not scaled.
static void rotate(float *numbers, int64_t size, float factor = 1.0f) {
    if (size == 128) return rotate_vectors<8>(numbers, factor);
    if (size == 64) return rotate_vectors<4>(numbers, factor);
    rotate_vectors<2>(numbers, factor);
}
static void rotate_back(float *numbers, int64_t size) { rotate(numbers, size, 1.0f / (float)size); }

// --- one group to bytes ---------------------------------------------------------------------------------------------

struct Extremes {
    float low, high;  // of the numbers that are not NaN
    bool are_finite;  // all numbers are
};
template <int COUNT>
INLINE Extremes find_extremes(const F32 *x) {
    F32 low = splat(INFINITE), high = splat(-INFINITE), check = splat(0.0f);
    UNROLL for (int i = 0; i < COUNT; i++) {
        low = minimum(x[i], low), high = maximum(x[i], high);
        check = fma(x[i], splat(0.0f), check);  // NaN from the first infinity or NaN on
    }
    return {min_lanes(low), max_lanes(high), mask_of(is_nan(check)) == 0};
}

INLINE uint32_t bf16_below(float value) {
    const uint32_t bits = bits_of(value);
    return (bits + (bits >> 31 ? 0xFFFF : 0)) >> 16;
}
INLINE uint32_t bf16_above(float value) { return (bits_of(value) + 0xFFFF) >> 16; }

struct Scaling {
    uint32_t scale_bits = NAN_BF16, zero_bits = 0;
    float zero = 0.0f, inverse = 0.0f, top = 0.0f;
    int level = 0;  // what is added to a code
};
// False if the group must decode to NaN: with the scaling as it is then, numbers of 0 get codes of 0.
template <class Shape>
INLINE bool choose_scaling(const Extremes &extremes, bool has_zeros, Scaling &scaling) {
    const float low = extremes.low, high = extremes.high;
    float zero = 0.0f, span = high > -low ? high : -low;
    float top = Shape::is_float8 ? FLOAT8_MAX : (float)Shape::num_levels;
    uint32_t zero_bits = 0;
    if (has_zeros) {
        zero_bits = bf16_below(low + 0.0f);
        zero = from_bf16(zero_bits);
        span = high - zero, top = (float)Shape::max_code;
    }
    const float ratio = span / top;
    const uint32_t scale_bits = bf16_above(ratio > MIN_SCALE ? ratio : MIN_SCALE);
    const float scale = from_bf16(scale_bits);
    if (!(extremes.are_finite && top * scale + zero < INFINITE)) return false;
    if (has_zeros || Shape::is_float8) {
        scaling = {scale_bits, zero_bits, zero, 1.0f / scale, top, 0};
    } else {
        // The number of the largest size gets the lowest level, which has no counterpart.
        const uint32_t signed_bits = high > -low ? scale_bits | SIGN_BF16 : scale_bits;
        scaling = {signed_bits, 0, 0.0f, 1.0f / from_bf16(signed_bits), top - 1.0f, Shape::num_levels};
    }
    return true;
}

template <class Shape>
static void encode_group(const Message &message, int64_t group, const float *numbers) {
    constexpr int COUNT = Shape::num_vectors;
    F32 x[COUNT];
    UNROLL for (int i = 0; i < COUNT; i++) x[i] = load(numbers + LANES * i);
    Extremes extremes = find_extremes<COUNT>(x);
    Scaling scaling;
    if (!choose_scaling<Shape>(extremes, message.has_zeros, scaling)) {
        UNROLL for (int i = 0; i < COUNT; i++) x[i] = splat(0.0f);
    }

    store_u16(message.scales + 2 * group, scaling.scale_bits);
    if (message.has_zeros) store_u16(message.zeros + 2 * group, scaling.zero_bits);
    I32 codes[COUNT];
    UNROLL for (int i = 0; i < COUNT; i++) {
        F32 scaled = (x[i] - splat(scaling.zero)) * splat(scaling.inverse);
        // Only the end without a level of its own must be clamped: the roundings of the scale's inverse and of the
        // product stay below half a step.
        if (message.format.symmetric) scaled = minimum(scaled, splat(scaling.top));
        I32 rounded = bits_of(scaled + splat(ROUND_TO_INTEGER)) + splat_int(scaling.level);
        codes[i] = Shape::is_float8 ? to_e4m3(scaled) : rounded;
    }
    using Low = Plane<Shape::low_bits, Shape::size>;
    Low::store(message.low_plane + group * Low::bytes, codes, 0, Shape::high_bits == 0);
    if constexpr (Shape::high_bits > 0) {
        using High = Plane<Shape::high_bits, Shape::size>;
        High::store(message.high_plane + group * High::bytes, codes, Shape::low_bits, true);
    }
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
    F32 number_of(I32 code) const {
        return fma(Shape::is_float8 ? from_e4m3(code) : to_float(code - level), scale, zero);
    }
    // Numbers `at` to `at + 15`.
    F32 numbers(int at) const {
        I32 code = Low::load(low_plane, at);
        if constexpr (Shape::high_bits > 0) code = code | shift_left(High::load(high_plane, at), Shape::low_bits);
        return number_of(code);
    }
    // Whether AVX512-BF16, which takes subnormal numbers for zero, rounds all numbers rightly: with scale and zero of
    // 8 bits of mantissa and at least 2^-100, or a zero of 0, no number but 0 is below 2^-116.
    bool rounds_exactly() const {
        return !PAIRS || (is_plain(scale_bits) && (is_plain(zero_bits) || (zero_bits & 0x7FFF) == 0));
    }
};

// Still rotated if the format rotates.
template <class Shape>
static void decode_group(const Message &message, int64_t group, float *numbers) {
    const CodedGroup<Shape> coded(message, group);
    UNROLL for (int at = 0; at < Shape::size; at += LANES) store(numbers + at, coded.numbers(at));
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
    UNROLL for (int at = 0; at < Shape::size; at += LANES) BFloat16::store(target + 2 * at, coded.numbers(at));
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

// Numbers from `count` on become the one before them.
static void fill_group(float *numbers, int64_t count, int64_t size) {
    for (int64_t at = count; at < size; at++) numbers[at] = numbers[count - 1];
}

// sums (float32) += the first `count` numbers.
static void add_numbers(float *sums, const float *numbers, int64_t count) {
    for (int64_t at = 0; at < count; at += LANES) {
        F32 sum = load_numbers<Float32>((const char *)(sums + at), count - at) + load(numbers + at);
        store_numbers<Float32>((char *)(sums + at), sum, count - at);
    }
}

// lost (float32) -= the first `count` numbers.
static void subtract_numbers(float *lost, const float *numbers, int64_t count) {
    for (int64_t at = 0; at < count; at += LANES) {
        F32 left = load_numbers<Float32>((const char *)(lost + at), count - at) - load(numbers + at);
        store_numbers<Float32>((char *)(lost + at), left, count - at);
    }
}

typedef void (*DecodeGroup)(const Message &, int64_t group, float *numbers);
typedef void (*EncodeGroup)(const Message &, int64_t group, const float *numbers);

// Encodes the sum of `numbers` and of what was carried, `count` of each, and carries what that loses. Overwrites `numbers`.
static void encode_carrying(
    const Message &message, int64_t group, float *numbers, float *carried, int64_t count, EncodeGroup encode, DecodeGroup decode
) {
    const int64_t size = message.format.group_elems;
    add_numbers(carried, numbers, count);
    for (int64_t at = 0; at < count; at += LANES)
        store(numbers + at, load_numbers<Float32>((const char *)(carried + at), count - at));
    fill_group(numbers, count, size);
    if (message.format.hadamard) rotate(numbers, size);
    encode(message, group, numbers);
    decode(message, group, numbers);
    if (message.format.hadamard) rotate_back(numbers, size);
    subtract_numbers(carried, numbers, count);
}

template <class Shape>
static void encode_groups(const tw_code_args &args, int64_t start, int64_t stop) {
    const Message message(args.message, args.format, args.num_elems);
    alignas(64) float numbers[MAX_GROUP];
    with_kind(args.kind, [&](auto number) {
        using Number = decltype(number);
        for (int64_t group = start; group < stop; group++) {
            const int64_t first = group * Shape::size, count = args.num_elems - first;
            const char *source = (const char *)args.numbers + Number::size * first;
            if (count >= Shape::size) {
                UNROLL for (int at = 0; at < Shape::size; at += LANES)
                    store(numbers + at, Number::load(source + Number::size * at));
            } else {
                for (int64_t at = 0; at < count; at += LANES)
                    store(numbers + at, load_numbers<Number>(source + Number::size * at, count - at));
                fill_group(numbers, count, Shape::size);
            }
            if (args.carried) {
                float *carried = (float *)args.carried + first;
                const int64_t kept = count < Shape::size ? count : Shape::size;
                encode_carrying(message, group, numbers, carried, kept, encode_group<Shape>, decode_group<Shape>);
                continue;
            }
            if (args.format.hadamard) rotate(numbers, Shape::size);
            encode_group<Shape>(message, group, numbers);
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
    const bool is_simple = !args.format.hadamard;
    alignas(64) float numbers[MAX_GROUP];
    for (int64_t group = start; group < stop; group++) {
        const int64_t first = group * Shape::size, left = args.num_elems - first;
        const int64_t count = left < Shape::size ? left : Shape::size;
        char *target = (char *)args.numbers + Number::size * first;
        if constexpr (Number::kind == BFLOAT16) {
            if (is_simple && count == Shape::size) {
                const CodedGroup<Shape> coded(message, group);
                if (coded.rounds_exactly()) {
                    decode_to_bf16(coded, target);
                    continue;
                }
            }
        }
        decode_group<Shape>(message, group, numbers);
        if (args.format.hadamard) rotate_back(numbers, Shape::size);
        for (int64_t at = 0; at < count; at += LANES)
            store_numbers<Number>(target + Number::size * at, load(numbers + at), count - at);
    }
}

void tw_decode(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    with_shape(args.format, [&](auto shape) {
        with_kind(args.kind, [&](auto number) { decode_groups<decltype(shape), decltype(number)>(args, start, stop); });
    });
}

static DecodeGroup decoder(const tw_block_format &format) {
    return with_shape(format, [](auto shape) -> DecodeGroup { return decode_group<decltype(shape)>; });
}
static EncodeGroup encoder(const tw_block_format &format) {
    return with_shape(format, [](auto shape) -> EncodeGroup { return encode_group<decltype(shape)>; });
}

void tw_decode_add(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    const Message message(args.message, args.format, args.num_elems);
    const DecodeGroup decode = decoder(args.format);
    const int64_t size = args.format.group_elems;
    alignas(64) float numbers[MAX_GROUP];
    for (int64_t group = start; group < stop; group++) {
        const int64_t first = group * size, left = args.num_elems - first;
        decode(message, group, numbers);
        if (args.format.hadamard) rotate_back(numbers, size);
        add_numbers((float *)args.numbers + first, numbers, left < size ? left : size);
    }
}

void tw_decode_reduce_encode(const void *recode_args, int64_t start, int64_t stop) {
    const tw_recode_args &args = *(const tw_recode_args *)recode_args;
    const tw_block_format &format = args.format, &out_format = args.out_format;
    const DecodeGroup decode = decoder(format);
    const EncodeGroup encode = encoder(out_format);
    const int64_t size = format.group_elems, out_size = out_format.group_elems;
    const bool stay_rotated = format.hadamard && out_format.hadamard && size == out_size && !args.carried;
    const DecodeGroup decode_out = decoder(out_format);
    const Message out(args.out, out_format, args.num_elems);
    alignas(64) float numbers[MAX_GROUP], sums[MAX_GROUP];
    for (int64_t block = start; block < stop; block++) {
        const int64_t first = block * MAX_GROUP, left = args.num_elems - first;
        const int64_t count = left < MAX_GROUP ? left : MAX_GROUP;
        for (int64_t i = 0; i < args.num_messages; i++) {
            const Message message(((const address *)args.messages)[i], format, args.num_elems);
            for (int64_t at = 0; at < count; at += size) {
                float *part = i == 0 ? sums + at : numbers;
                decode(message, (first + at) / size, part);
                if (format.hadamard && !stay_rotated) rotate_back(part, size);
                if (i > 0) add_numbers(sums + at, numbers, size);
            }
        }
        for (int64_t at = 0; at < count; at += out_size) {
            const int64_t group = (first + at) / out_size, kept = count - at < out_size ? count - at : out_size;
            if (args.carried) {
                float *carried = (float *)args.carried + first + at;
                encode_carrying(out, group, sums + at, carried, kept, encode, decode_out);
                continue;
            }
            if (!stay_rotated) {
                if (count - at < out_size) fill_group(sums + at, count - at, out_size);
                if (out_format.hadamard) rotate(sums + at, out_size);
            }
            encode(out, group, sums + at);
        }
    }
}
