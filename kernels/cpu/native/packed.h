// Packed weights (kernels/spec/packed_format.py): blocks of 32 codes with a float16 scale, and a minimum in Q4_1.
//
// A block's numbers are made by the same instructions wherever they are used, so a product has the same bits whether its
// weights are unpacked before or on the way.
#pragma once
#include "numbers.h"

constexpr int64_t GROUP = 32;  // numbers of a block

template <int BITS, bool HAS_MINIMUM>
struct PackedFormat {
    static constexpr int bits = BITS;
    static constexpr bool has_minimum = HAS_MINIMUM;
    static constexpr int64_t header_bytes = HAS_MINIMUM ? 4 : 2, block_bytes = header_bytes + GROUP * BITS / 8;
};
using Q8_0 = PackedFormat<8, false>;
using Q4_0 = PackedFormat<4, false>;
using Q4_1 = PackedFormat<4, true>;

// Three more of each: INT8_KINDS are multiplied with activations in 8 bits, INTERLEAVED_KINDS too, and full sixteens of
// their rows are interleaved (int8_activations.cpp).
enum PackedKind : int64_t { KIND_Q8_0 = 3, KIND_Q4_0 = 4, KIND_Q4_1 = 5, INT8_KINDS = 6, INTERLEAVED_KINDS = 9 };
INLINE bool is_packed(int64_t kind) { return kind >= KIND_Q8_0; }
INLINE bool is_int8(int64_t kind) { return kind >= INT8_KINDS; }
INLINE bool is_interleaved(int64_t kind) { return kind >= INTERLEAVED_KINDS; }
// The kind of the blocks of an integer kind.
INLINE int64_t stored_kind(int64_t kind) { return KIND_Q8_0 + (kind - KIND_Q8_0) % 3; }

template <class Work>
INLINE auto with_packed(int64_t kind, Work work) {
    if (kind == KIND_Q8_0) return work(Q8_0());
    if (kind == KIND_Q4_0) return work(Q4_0());
    return work(Q4_1());
}

struct BlockHeader {
    float scale, minimum;  // the minimum of a format without one is part of its codes
};

INLINE BlockHeader block_header(const char *block) {
#if defined(__x86_64__)
    // Both at once, as an integer: a float16 alone goes through a register with a false dependency.
    int32_t halves;
    memcpy(&halves, block, sizeof halves);
    __m128 floats = _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
    return {floats[0], floats[1]};
#else
    __fp16 halves[2];
    memcpy(halves, block, sizeof halves);
    return {(float)halves[0], (float)halves[1]};
#endif
}

// REG_LANES bytes, each widened to an int32 lane.
template <bool SIGNED>
INLINE IntReg load_bytes(const char *source) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128((const __m128i *)source);
    return (IntReg)(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64((const __m128i *)source);
    return (IntReg)(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    IntReg out;
    for (int lane = 0; lane < REG_LANES; lane++) out[lane] = SIGNED ? (int8_t)source[lane] : (uint8_t)source[lane];
    return out;
#endif
}

// Numbers 16 half + REG_LANES reg and those that follow, a register of them.
template <class Format>
INLINE FloatReg block_numbers(const char *block, BlockHeader header, int half, int reg) {
    const char *codes = block + Format::header_bytes;
    IntReg code;
    if constexpr (Format::bits == 8) {
        code = load_bytes<true>(codes + LANES * half + REG_LANES * reg);
    } else {
        IntReg both = load_bytes<false>(codes + REG_LANES * reg);
        code = half == 0 ? both & 15 : both >> 4;
        if constexpr (!Format::has_minimum) code = code - 8;
    }
    FloatReg numbers = __builtin_convertvector(code, FloatReg);
    if constexpr (Format::has_minimum) return fma_reg(numbers, splat_reg(header.scale), splat_reg(header.minimum));
    return numbers * splat_reg(header.scale);
}

#if defined(__AVX512BF16__)
// The 32 numbers of a block rounded to bfloat16, in order.
template <class Format>
INLINE __m512i block_pairs(const char *block) {
    BlockHeader header = block_header(block);
    if constexpr (Format::bits == 8) {
        __m512 first = (__m512)block_numbers<Format>(block, header, 0, 0);
        __m512 second = (__m512)block_numbers<Format>(block, header, 1, 0);
        return (__m512i)_mm512_cvtne2ps_pbh(second, first);
    } else {
        // Four bits make sixteen numbers: computed once, then looked up.
        FloatReg codes = to_float(lane_numbers()).reg[0];
        FloatReg numbers;
        if constexpr (Format::has_minimum)
            numbers = fma_reg(codes, splat_reg(header.scale), splat_reg(header.minimum));
        else
            numbers = (codes - 8.0f) * splat_reg(header.scale);
        __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)numbers);
        __m512i table = _mm512_broadcast_i64x4(narrow);
        __m128i stored = _mm_loadu_si128((const __m128i *)(block + Format::header_bytes));
        __m256i low = _mm256_cvtepu8_epi16(stored), high = _mm256_srli_epi16(low, 4);
        // The lookup takes five bits; the table holds the sixteen numbers twice.
        return _mm512_permutexvar_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), table);
    }
}
#endif

// Groups that follow each other as float32, or as bfloat16 if `PAIR`.
template <class Format, bool PAIR>
INLINE void unpack_groups(char *target, const char *source, int64_t num_groups) {
    for (int64_t group = 0; group < num_groups; group++) {
        const char *block = source + group * Format::block_bytes;
        if constexpr (PAIR) {
#if defined(__AVX512BF16__)
            _mm512_storeu_si512(target + 2 * GROUP * group, block_pairs<Format>(block));
#endif
        } else {
            BlockHeader header = block_header(block);
            for (int half = 0; half < 2; half++)
                for (int reg = 0; reg < REGS; reg++) {
                    FloatReg numbers = block_numbers<Format>(block, header, half, reg);
                    memcpy(target + 4 * (GROUP * group + LANES * half + REG_LANES * reg), &numbers, sizeof numbers);
                }
        }
    }
}
