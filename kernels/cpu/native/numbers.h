// How a tensor's numbers are stored (float32, bfloat16, float16), and reading and writing them as float32 lanes.
#pragma once
#include "vec.h"

// Values that Python passes for a dtype; packed formats follow behind (linear/formats.h). INT8_HEADS: of KV caches alone
// (attention/int8_heads.h).
enum Kind : int64_t { INT8_HEADS = -1, FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // bfloat16 is multiplied in pairs: AVX512-BF16
#else
constexpr bool PAIRS = false;
#endif

// `load_reg` reads the numbers of a register, `load` sixteen.
struct Float32 {
    static constexpr int64_t size = 4, kind = FLOAT32;
    INLINE FloatReg load_reg(const char *source) { return ::load_reg(source); }
    INLINE F32 load(const char *source) { return ::load(source); }
    INLINE void store(char *target, F32 value) { ::store(target, value); }
    INLINE F32 rounded(F32 value) { return value; }
    INLINE void store_rounded(char *target, F32 value) { ::store(target, value); }
};

// The upper half of float32 bits, rounded to nearest even; NaN stays NaN.
INLINE I32 bf16_bits(F32 value) {
    I32 bits = bits_of(value);
    I32 odd = shift_right(bits, 16) & splat_int(1);
    I32 rounded = bits + splat_int(0x7FFF) + odd;
    return shift_right(select(is_nan(value), splat_int(0x7FC00000), rounded), 16);
}

// Sixteen bytes, each as a lane.
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

INLINE uint32_t load_u16(const char *source) {
    uint16_t value;
    memcpy(&value, source, sizeof value);
    return value;
}
// The lower 16 bits of each lane.
INLINE void store_low_halves(char *target, I32 value) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)target, _mm512_cvtepi32_epi16((__m512i)value.reg[0]));
#elif defined(__AVX2__)
    __m256i packed = _mm256_packus_epi32((__m256i)value.reg[0], (__m256i)value.reg[1]);
    _mm256_storeu_si256((__m256i *)target, _mm256_permute4x64_epi64(packed, 0xD8));
#else
    for (int i = 0; i < REGS; i++) vst1_u16((uint16_t *)target + REG_LANES * i, vmovn_u32((uint32x4_t)value.reg[i]));
#endif
}
// 16-bit numbers, each in the low half of a lane.
INLINE IntReg load_low_halves_reg(const char *source) {
#if defined(__AVX512F__)
    return (IntReg)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)source));
#elif defined(__AVX2__)
    return (IntReg)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)source));
#else
    return (IntReg)vmovl_u16(vld1_u16((const uint16_t *)source));
#endif
}
EACH(I32, load_low_halves, (const char *source), load_low_halves_reg(source + 2 * REG_LANES * i))

struct BFloat16 {
    static constexpr int64_t size = 2, kind = BFLOAT16;
    INLINE FloatReg load_reg(const char *source) { return (FloatReg)(load_low_halves_reg(source) << 16); }
    INLINE F32 load(const char *source) { return floats_of(shift_left(load_low_halves(source), 16)); }
    INLINE void store(char *target, F32 value) { store_low_halves(target, bf16_bits(value)); }
    // One instruction where the CPU has it; numbers below the least normal one (1e-38) may become zero there.
#if defined(__AVX512BF16__)
    INLINE F32 rounded(F32 value) {
        __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)value.reg[0]);
        F32 out;
        out.reg[0] = (FloatReg)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
        return out;
    }
    INLINE void store_rounded(char *target, F32 value) {
        _mm256_storeu_si256((__m256i *)target, (__m256i)_mm512_cvtneps_pbh((__m512)value.reg[0]));
    }
#else
    INLINE F32 rounded(F32 value) { return floats_of(shift_left(bf16_bits(value), 16)); }
    INLINE void store_rounded(char *target, F32 value) { store(target, value); }
#endif
};

struct Float16 {
    static constexpr int64_t size = 2, kind = FLOAT16;
    INLINE FloatReg load_reg(const char *source) {
#if defined(__AVX512F__)
        return (FloatReg)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)source));
#elif defined(__AVX2__)
        return (FloatReg)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)source));
#else
        return (FloatReg)vcvt_f32_f16(vld1_f16((const float16_t *)source));
#endif
    }
    EACH(F32, load, (const char *source), load_reg(source + size * REG_LANES * i))
    INLINE void store(char *target, F32 value) {
#if defined(__AVX512F__)
        _mm256_storeu_si256((__m256i *)target, _mm512_cvtps_ph((__m512)value.reg[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
        for (int i = 0; i < REGS; i++)
            _mm_storeu_si128((__m128i *)target + i, _mm256_cvtps_ph((__m256)value.reg[i], _MM_FROUND_TO_NEAREST_INT));
#else
        for (int i = 0; i < REGS; i++) vst1_f16((float16_t *)target + REG_LANES * i, vcvt_f16_f32((float32x4_t)value.reg[i]));
#endif
    }
    INLINE F32 rounded(F32 value) {
        char narrow[2 * LANES];
        store(narrow, value);
        return load(narrow);
    }
    INLINE void store_rounded(char *target, F32 value) { store(target, value); }
};

// Up to sixteen numbers; lanes from `count` on are zero, and nothing behind the last number is read.
template <class Number>
INLINE F32 load_numbers(const char *source, int64_t count) {
    if (count >= LANES) return Number::load(source);
    char stage[4 * LANES] = {};
    memcpy(stage, source, Number::size * count);
    return Number::load(stage);
}
// Up to sixteen numbers, rounded to nearest even; nothing is written behind `count`.
template <class Number>
INLINE void store_numbers(char *target, F32 value, int64_t count) {
    if (count >= LANES) return Number::store(target, value);
    char stage[4 * LANES];
    Number::store(stage, value);
    memcpy(target, stage, Number::size * count);
}
// `store_numbers` of Number::rounded(value), at once.
template <class Number>
INLINE void store_rounded(char *target, F32 value, int64_t count) {
    if (count >= LANES) return Number::store_rounded(target, value);
    store_numbers<Number>(target, Number::rounded(value), count);
}

// Calls `work` with the Number of a kind known at run time: `with_kind(kind, [&]<class Number>(Number) { ... })`.
INLINE auto with_kind(int64_t kind, auto work) {
    if (kind == BFLOAT16) return work(BFloat16());
    if (kind == FLOAT32) return work(Float32());
    return work(Float16());
}
INLINE int64_t size_of(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }
