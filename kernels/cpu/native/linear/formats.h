// Packed weights (kernels/spec/gguf_blocks.py): where the codes, scales and minima of a block are.
//
// A Source has the fields at places of a block: `word` of four bytes, `pair` of two and `byte`, and float16 `half`. TileSource has those
// of a register of interleaved blocks (interleaved.h), and BlockSource those of one.
#pragma once
#include "../numbers.h"

constexpr int GROUP = 32;  // numbers that share a scale in most formats, and activations that do

// Codes of BITS bits: the lowest bits of RUN bytes, then their next ones, ..., then the next RUN bytes. Sixteen codes that follow a
// multiple of sixteen are in as many bytes, at one shift.
template <unsigned AT, unsigned BITS, unsigned RUN>
struct Plane {
    static constexpr int bits = BITS, in_run = RUN * 8 / BITS;
    static constexpr unsigned place(unsigned number) { return AT + number / in_run * RUN + number % RUN; }
    static constexpr unsigned shift(unsigned number) { return BITS * (number % in_run / RUN); }
};
struct NoPlane {
    static constexpr int bits = 0;
};

// What most formats have; the others hide it.
template <int NUM_BYTES, int HEAD_BYTES, int NUM_GROUPS, class LOW, class HIGH = NoPlane>
struct BlockFormat {
    using Low = LOW;
    using High = HIGH;
    // Pieces of two bytes, or one of one, before the words of four bytes, and behind them.
    static constexpr int num_bytes = NUM_BYTES, head_bytes = HEAD_BYTES, tail_bytes = 0;
    static constexpr int num_groups = NUM_GROUPS;
    static constexpr int num_parts = 1;  // of a group, with a scale each
    static constexpr int offset = 0;     // subtracted from codes
    static constexpr int fifths_at = 0;  // four bytes with the fifth bits of a group; 0: none
    static constexpr bool has_minimum = false;
    static constexpr const int8_t *table = nullptr;  // of the numbers that codes stand for
    static constexpr int floats_at = 0;              // float16 d, and m behind it
    // Scale and minimum of a part; those of superblocks are d and m times integers, which `integers` has for all parts as lanes.
    static auto scale(auto source, unsigned) { return source.half(0); }
    static auto minimum(auto source, unsigned) { return source.half(2); }
};

constexpr uint64_t EACH_BYTE = 0x0101010101010101;
INLINE I32 widen_bytes(uint64_t low, uint64_t high) { return widen((Bytes)TwoWords{low, high}); }

alignas(16) constexpr int8_t IQ4_TABLE[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t MXFP4_TABLE[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Q8_0 : BlockFormat<34, 2, 1, Plane<2, 8, 32>> {};
struct Q4_0 : BlockFormat<18, 2, 1, Plane<2, 4, 16>> {
    static constexpr int offset = 8;
};
struct Q4_1 : BlockFormat<20, 4, 1, Plane<4, 4, 16>> {
    static constexpr bool has_minimum = true;
};
struct Q5_0 : BlockFormat<22, 2, 1, Plane<6, 4, 16>> {
    static constexpr int offset = 16, fifths_at = 2;
};
struct Q5_1 : BlockFormat<24, 4, 1, Plane<8, 4, 16>> {
    static constexpr int fifths_at = 4;
    static constexpr bool has_minimum = true;
};
struct IQ4_NL : BlockFormat<18, 2, 1, Plane<2, 4, 16>> {
    static constexpr const int8_t *table = IQ4_TABLE;
};
struct MXFP4 : BlockFormat<17, 1, 1, Plane<1, 4, 16>> {
    static constexpr const int8_t *table = MXFP4_TABLE;
    // 2^(e - 128): float32 bits, of a subnormal number if e is below 2.
    static auto scale(auto source, unsigned) {
        const auto exponent = source.byte(0);
        return source.float_of_bits(exponent < 2 ? (exponent + 1) << 21 : (exponent - 1) << 23);
    }
};
struct Q2_K : BlockFormat<84, 0, 8, Plane<16, 2, 32>> {
    static constexpr int num_parts = 2, floats_at = 80, tail_bytes = 4;
    static constexpr bool has_minimum = true;
    static void integers(const char *block, I32 &scales, I32 &minima) {
        const I32 both = widen_bytes(load_bits(block, 8), load_bits(block + 8, 8));
        scales = both & splat_int(15), minima = shift_right(both, 4);
    }
    static auto scale(auto source, unsigned part) {
        return source.half(80) * source.to_float(source.word(part / 4 * 4) >> (8 * (part % 4)) & 15);
    }
    static auto minimum(auto source, unsigned part) {
        return -(source.half(82) * source.to_float(source.word(part / 4 * 4) >> (8 * (part % 4) + 4) & 15));
    }
};
struct Q3_K : BlockFormat<110, 0, 8, Plane<32, 2, 32>, Plane<0, 1, 32>> {
    static constexpr int num_parts = 2, floats_at = 108, tail_bytes = 2, offset = 4;
    static void integers(const char *block, I32 &scales, I32 &) {
        const uint64_t low = load_bits(block + 96, 8), high = load_bits(block + 104, 4), twice = high | high << 30;
        scales = widen_bytes((low & 15 * EACH_BYTE) | (twice & 3 * EACH_BYTE) << 4,
                             (low >> 4 & 15 * EACH_BYTE) | (twice >> 4 & 3 * EACH_BYTE) << 4) -
                 splat_int(32);
    }
    static auto scale(auto source, unsigned part) {
        const auto low = source.word(96 + part % 8 / 4 * 4) >> (8 * (part % 4) + 4 * (part / 8)) & 15;
        const auto high = source.word(104) >> (8 * (part % 4) + 2 * (part / 4)) & 3;
        return source.half(108) * source.to_float((low | high << 4) - 32);
    }
};
// Q4_K and Q5_K: eight scales and eight minima of six bits in twelve bytes.
template <class Format>
struct TwelveBytes : Format {
    static constexpr bool has_minimum = true;
    static void integers(const char *block, I32 &scales, I32 &minima) {
        const uint64_t first = load_bits(block + 4, 4), second = load_bits(block + 8, 4), rest = load_bits(block + 12, 4);
        const uint64_t ones = EACH_BYTE >> 32;
        const uint64_t fifth = (rest & 15 * ones) | (first >> 6 & 3 * ones) << 4;
        const uint64_t thirteenth = (rest >> 4 & 15 * ones) | (second >> 6 & 3 * ones) << 4;
        scales = widen_bytes((first & 63 * ones) | fifth << 32, 0),
        minima = widen_bytes((second & 63 * ones) | thirteenth << 32, 0);
    }
    // `word`: of the first four; the upper bits of these bytes are those of the other four, whose lower bits begin at `rest`.
    static auto integer(auto source, unsigned part, int word, int rest) {
        const int shift = 8 * (part % 4);
        if (part < 4) return source.to_float(source.word(word) >> shift & 63);
        return source.to_float((source.word(12) >> (shift + rest) & 15) | (source.word(word) >> (shift + 6) & 3) << 4);
    }
    static auto scale(auto source, unsigned part) { return source.half(0) * integer(source, part, 4, 0); }
    static auto minimum(auto source, unsigned part) { return -(source.half(2) * integer(source, part, 8, 4)); }
};
struct Q4_K : TwelveBytes<BlockFormat<144, 4, 8, Plane<16, 4, 32>>> {};
struct Q5_K : TwelveBytes<BlockFormat<176, 4, 8, Plane<48, 4, 32>, Plane<16, 1, 32>>> {};
struct Q6_K : BlockFormat<210, 0, 8, Plane<0, 4, 64>, Plane<128, 2, 32>> {
    static constexpr int num_parts = 2, floats_at = 208, tail_bytes = 2, offset = 32;
    static void integers(const char *block, I32 &scales, I32 &) {
        const I32 bytes = widen_bytes(load_bits(block + 192, 8), load_bits(block + 200, 8));
        scales = bytes - shift_left(bytes & splat_int(128), 1);
    }
    static auto scale(auto source, unsigned part) {
        const auto integer = source.word(192 + part / 4 * 4) >> (8 * (part % 4)) & 255;
        return source.half(208) * source.to_float((integer ^ 128) - 128);
    }
};
struct IQ4_XS : BlockFormat<136, 4, 8, Plane<8, 4, 16>> {
    static constexpr const int8_t *table = IQ4_TABLE;
    static void integers(const char *block, I32 &scales, I32 &) {
        const I32 group = lane_numbers() & splat_int(7), two = splat_int(2);
        const I32 low = shift_right(splat_int((int32_t)load_bits(block + 4, 4)), shift_left(group, two)) & splat_int(15);
        const I32 high = shift_right(splat_int((int32_t)load_bits(block + 2, 2)), group + group) & splat_int(3);
        scales = (low | shift_left(high, 4)) - splat_int(32);
    }
    static auto scale(auto source, unsigned part) {
        const auto low = source.word(4) >> (4 * part) & 15, high = source.pair(2) >> (2 * part) & 3;
        return source.half(0) * source.to_float((low | high << 4) - 32);
    }
};

// The kind of a packed matrix: a format, INT8 if it is multiplied with activations in 8 bits, and INTERLEAVED if full sixteens of
// its rows are interleaved too (int8_activations.cpp).
enum PackedKind : int64_t { FIRST_PACKED = 3, FORMATS = 31, INT8 = 32, INTERLEAVED = 64 };
INLINE bool is_packed(int64_t kind) { return kind >= FIRST_PACKED; }
INLINE bool is_int8(int64_t kind) { return kind & INT8; }
INLINE bool is_interleaved(int64_t kind) { return kind & INTERLEAVED; }

// Calls `work` with the format of a kind.
INLINE auto with_packed(int64_t kind, auto work) {
    switch (kind & FORMATS) {
        case 3: return work(Q8_0());
        case 4: return work(Q4_0());
        case 5: return work(Q4_1());
        case 6: return work(Q5_0());
        case 7: return work(Q5_1());
        case 8: return work(IQ4_NL());
        case 9: return work(MXFP4());
        case 10: return work(Q2_K());
        case 11: return work(Q3_K());
        case 12: return work(Q4_K());
        case 13: return work(Q5_K());
        case 14: return work(Q6_K());
        case 15: return work(IQ4_XS());
    }
    __builtin_trap();  // gguf_blocks.py has no other kinds
}

// --- codes ------------------------------------------------------------------------------------------------------------

// Numbers of the table for codes below 16, in every byte of a vector.
template <class Format, class Vector>
INLINE Vector look_up(Vector codes) {
#if defined(__x86_64__)
    const __m128i table = _mm_load_si128((const __m128i *)Format::table);
#if defined(__AVX512F__)
    if constexpr (sizeof codes == 64) return (Vector)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#endif
    if constexpr (sizeof codes == 32) return (Vector)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#else
    for (size_t at = 0; at < sizeof codes; at += 16) {
        uint8x16_t part;
        memcpy(&part, (const char *)&codes + at, 16);
        part = (uint8x16_t)vqtbl1q_s8(vld1q_s8(Format::table), part);
        memcpy((char *)&codes + at, &part, 16);
    }
    return codes;
#endif
}

// The codes of a register's fields, in their lowest bits; ONES has the lowest bit of every field. They are `at` numbers behind
// `number`, a multiple of sixteen. `load` returns the fields at a place of the block.
template <class Format, uint32_t ONES>
INLINE UintReg read_codes(unsigned number, unsigned at, auto load) {
    using Low = typename Format::Low;
    using High = typename Format::High;
    UintReg codes = load(Low::place(number) + at);
    if constexpr (Low::bits < 8) codes = codes >> Low::shift(number) & ((1u << Low::bits) - 1) * ONES;
    if constexpr (High::bits > 0)
        codes |= (load(High::place(number) + at) >> High::shift(number) & ((1u << High::bits) - 1) * ONES) << Low::bits;
    return codes;
}
