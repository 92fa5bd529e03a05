// Decoding of messages (codec.h): a group stays in registers. Also sums of messages, encoded again.
#include "codec.h"

namespace {
constexpr uint32_t INFINITE_BF16 = 0x7F80;

INLINE float from_bf16(uint32_t bits) { return float_of(bits << 16); }

// A bfloat16 number that is finite and at least 2^-100 in size.
INLINE bool is_plain(uint32_t bits) { return (bits & 0x7FFF) >= 27 << 7 && (bits & 0x7FFF) < INFINITE_BF16; }

template <class Shape>
struct CodedGroup {
    typename Shape::CodePlanes planes;
    uint32_t scale_bits, zero_bits;
    F32 scale, zero;
    I32 level;

    CodedGroup(const Message &message, int64_t group) : planes(message.planes, message.num_groups, group) {
        scale_bits = load_u16(message.scales + 2 * group);
        // Adding -0 changes nothing, not even a -0.
        zero_bits = message.has_zeros ? load_u16(message.zeros + 2 * group) : 0x8000;
        scale = splat(from_bf16(scale_bits)), zero = splat(from_bf16(zero_bits));
        level = splat_int(message.format.symmetric ? Shape::num_levels : 0);
    }
    // Sums add `raise` to each level, and take it off in `start` (kernels/spec/block_quant.py).
    static constexpr int raise = Shape::is_float8 ? 0 : 128;
    float start() const { return from_bf16(zero_bits) - (raise + level.reg[0][0]) * from_bf16(scale_bits); }
    F32 raised(I32 code) const { return Shape::is_float8 ? from_e4m3(code) : to_float(code + splat_int(raise)); }
    F32 number_of(I32 code) const { return fma(Shape::is_float8 ? from_e4m3(code) : to_float(code - level), scale, zero); }
    // Of numbers `at` to `at + 15`.
    I32 codes(int at) const { return planes.load(at); }
    F32 numbers(int at) const { return number_of(codes(at)); }
    // Whether AVX512-BF16, which takes subnormal numbers for zero, rounds all numbers rightly: with scale and zero of
    // 8 bits of mantissa and at least 2^-100, or a zero of 0, no number but 0 is below 2^-116.
    bool rounds_exactly() const {
        return !PAIRS || (is_plain(scale_bits) && (is_plain(zero_bits) || (zero_bits & 0x7FFF) == 0));
    }
};

template <class Shape>
INLINE void turn_back(F32 (&x)[Shape::num_vectors]) {
    rotate(x);
    UNROLL_FOR (int i = 0; i < Shape::num_vectors; i++) x[i] = x[i] * splat(1.0f / Shape::size);
}

template <class Shape>
INLINE void decode_group(const Message &message, int64_t group, F32 (&x)[Shape::num_vectors]) {
    const CodedGroup<Shape> coded(message, group);
    UNROLL_FOR (int i = 0; i < Shape::num_vectors; i++) x[i] = coded.numbers(LANES * i);
    if (message.format.hadamard) turn_back<Shape>(x);
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
            __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(coded.planes.first + at)));
            _mm512_storeu_si512(target + 2 * at, _mm512_permutexvar_epi16(pairs, table));
            pairs = _mm512_srli_epi16(pairs, 4);
            _mm512_storeu_si512(target + 2 * (bytes + at), _mm512_permutexvar_epi16(pairs, table));
        }
        return;
    }
    UNROLL_FOR (int at = 0; at < Shape::size; at += 2 * LANES) {
        F32 first = coded.numbers(at), second = coded.numbers(at + LANES);
        __m512i narrow = (__m512i)_mm512_cvtne2ps_pbh((__m512)second.reg[0], (__m512)first.reg[0]);
        _mm512_storeu_si512(target + 2 * at, narrow);
    }
#else
    UNROLL_FOR (int at = 0; at < Shape::size; at += LANES) BFloat16::store(target + 2 * at, coded.numbers(at));
#endif
}

template <class Shape, class Number>
void decode_groups(const tw_code_args &args, int64_t start, int64_t stop) {
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
        decode_group<Shape>(message, group, x);
        UNROLL_FOR (int i = 0; i < Shape::num_vectors; i++) {
            char *place = target + Number::size * LANES * i;
            if (rounds_exactly && left >= Shape::size)
                Number::store_rounded(place, x[i]);
            else if (LANES * i < left)
                store_numbers<Number>(place, x[i], left - LANES * i);
        }
    }
}

// Adds messages' groups from `first` on to `sums`. They stay rotated, unless `turns_back`.
template <class Shape>
void add_groups(const tw_recode_args &args, int64_t first, int64_t num_groups, bool turns_back, float *sums) {
    float starts[BLOCK / Shape::size] = {};
    for (int64_t i = 0; i < args.num_messages; i++) {
        const Message message(((const address *)args.messages)[i], args.format, args.num_elems);
        for (int64_t at = 0; at < num_groups; at++) starts[at] += CodedGroup<Shape>(message, first + at).start();
    }
    for (int64_t i = 0; i < args.num_messages; i++) {
        const Message message(((const address *)args.messages)[i], args.format, args.num_elems);
        for (int64_t at = 0; at < num_groups; at++) {
            const CodedGroup<Shape> coded(message, first + at);
            float *sum = sums + at * Shape::size;
            F32 x[Shape::num_vectors];
            UNROLL_FOR (int j = 0; j < Shape::num_vectors; j++) {
                const F32 before = i ? load(sum + LANES * j) : splat(starts[at]);
                x[j] = fma(coded.raised(coded.codes(LANES * j)), coded.scale, before);
            }
            if (turns_back && i + 1 == args.num_messages) turn_back<Shape>(x);
            UNROLL_FOR (int j = 0; j < Shape::num_vectors; j++) store(sum + LANES * j, x[j]);
        }
    }
}
}  // namespace

void tw_decode(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    with_shape(args.format, [&]<class Shape>(Shape) {
        with_kind(args.kind, [&]<class Number>(Number) { decode_groups<Shape, Number>(args, start, stop); });
    });
}

void tw_decode_add(const void *code_args, int64_t start, int64_t stop) {
    const tw_code_args &args = *(const tw_code_args *)code_args;
    const Message message(args.message, args.format, args.num_elems);
    with_shape(args.format, [&]<class Shape>(Shape) {
        for (int64_t group = start; group < stop; group++) {
            F32 x[Shape::num_vectors];
            decode_group<Shape>(message, group, x);
            float *sums = (float *)args.numbers + group * Shape::size;
            const int64_t left = args.num_elems - group * Shape::size;
            if (left >= Shape::size) {
                UNROLL_FOR (int i = 0; i < Shape::num_vectors; i++) store(sums + LANES * i, load(sums + LANES * i) + x[i]);
                continue;
            }
            alignas(64) float numbers[Shape::size];
            UNROLL_FOR (int i = 0; i < Shape::num_vectors; i++) store(numbers + LANES * i, x[i]);
            for (int64_t at = 0; at < left; at++) sums[at] += numbers[at];
        }
    });
}

void tw_decode_reduce_encode(const void *recode_args, int64_t start, int64_t stop) {
    const tw_recode_args &args = *(const tw_recode_args *)recode_args;
    const tw_block_format &format = args.format, &out_format = args.out_format;
    const EncodeBlock encode = block_encoder(out_format);
    const int64_t size = format.group_elems, out_size = out_format.group_elems;
    const bool stay_rotated = format.hadamard && out_format.hadamard && size == out_size;
    const Message out(args.out, out_format, args.num_elems);
    const int64_t end = least(stop * MAX_GROUP, args.num_elems);
    alignas(64) float sums[BLOCK];
    for (int64_t first = start * MAX_GROUP; first < end; first += BLOCK) {
        const int64_t count = least(end - first, BLOCK);
        const int64_t num_groups = (count + size - 1) / size;
        const bool turns_back = format.hadamard && !stay_rotated;
        with_shape(format, [&]<class S>(S) { add_groups<S>(args, first / size, num_groups, turns_back, sums); });
        // Numbers that are still rotated fill their groups.
        const int64_t kept = stay_rotated ? num_groups * size : count;
        encode(out, first / out_size, (const char *)sums, kept, out_format.hadamard && !stay_rotated,
               carried_at(args.carried, first));
    }
}
