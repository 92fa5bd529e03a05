// Sixteen float32 lanes (F32) and sixteen int32 lanes (I32): the vector types of every CPU kernel.
//
// A lane's operations and their order stand in the source, so a kernel gives the same bits at every level: one register
// of AVX-512, two of AVX2, four of NEON. Nothing is contracted or reordered (-ffp-contract=off, no fast-math).
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "Tightwire's CPU kernels need x86-64 with AVX2, FMA and F16C, or aarch64"
#endif

// Before a loop of a few steps: compilers keep arrays in registers only if it is unrolled early.
#define UNROLL_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)
#define INLINE static inline __attribute__((always_inline))

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int REG_LANES = 16;
#elif defined(__AVX2__)
constexpr int REG_LANES = 8;
#else
constexpr int REG_LANES = 4;
#endif
constexpr int REGS = LANES / REG_LANES;
// True where a vector fits one of 32 registers; elsewhere tiles must be smaller.
constexpr bool WIDE = REGS == 1;

typedef float FloatReg __attribute__((vector_size(4 * REG_LANES)));
typedef int32_t IntReg __attribute__((vector_size(4 * REG_LANES)));
typedef uint32_t UintReg __attribute__((vector_size(4 * REG_LANES)));

template <class R>
struct Vector {
    typedef R Reg;
    Reg reg[REGS];
};
typedef Vector<FloatReg> F32;
typedef Vector<IntReg> I32;
typedef Vector<UintReg> U32;

// EACH(F32, f, (F32 a), expression of a.reg[i]): a function of vectors, register by register.
#define EACH(Out, name, parameters, expression) \
    INLINE Out name parameters {                \
        Out out;                                \
        for (int i = 0; i < REGS; i++) {        \
            out.reg[i] = expression;            \
        }                                       \
        return out;                             \
    }
// An operator between the lanes of two vectors.
#define LANEWISE(Out, op, In) EACH(Out, operator op, (In a, In b), (Out::Reg)(a.reg[i] op b.reg[i]))

INLINE FloatReg load_reg(const void *source) {
    FloatReg out;
    memcpy(&out, source, sizeof out);
    return out;
}
// Register by register: compilers keep a vector that is copied whole in memory.
EACH(F32, load, (const void *source), load_reg((const char *)source + sizeof(FloatReg) * i))
INLINE void store(void *target, F32 value) {
    for (int i = 0; i < REGS; i++) memcpy((char *)target + sizeof(FloatReg) * i, &value.reg[i], sizeof(FloatReg));
}
// Up to eight bytes, the first one lowest.
INLINE uint64_t load_bits(const char *source, int num_bytes) {
    uint64_t bits = 0;
    memcpy(&bits, source, num_bytes);
    return bits;
}

constexpr int LINE_BYTES = 64;  // of a cache
// Level 1 to 3 is the cache to load into; any address is allowed.
template <int LEVEL = 1>
INLINE void prefetch(const char *address) {
    __builtin_prefetch(address, 0, 4 - LEVEL);
}
// x - 0 is x to the bit, and no instruction; x + 0 would turn -0 into 0.
INLINE FloatReg splat_reg(float value) { return value - FloatReg{}; }
EACH(F32, splat, (float value), splat_reg(value))
LANEWISE(F32, +, F32)
LANEWISE(F32, -, F32)
LANEWISE(F32, *, F32)
EACH(F32, operator-, (F32 a), -a.reg[i])
LANEWISE(F32, /, F32)

INLINE FloatReg fma_reg(FloatReg a, FloatReg b, FloatReg c) {
#if defined(__AVX512F__)
    return (FloatReg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (FloatReg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (FloatReg)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}
// a * b + c, rounded once.
EACH(F32, fma, (F32 a, F32 b, F32 c), fma_reg(a.reg[i], b.reg[i], c.reg[i]))
// Where a lane of either is NaN, maximum and minimum give b's. By intrinsics: compilers compare and blend.
#if defined(__AVX512F__)
INLINE FloatReg max_reg(FloatReg a, FloatReg b) { return (FloatReg)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE FloatReg min_reg(FloatReg a, FloatReg b) { return (FloatReg)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE UintReg max_reg(UintReg a, UintReg b) { return (UintReg)_mm512_max_epu32((__m512i)a, (__m512i)b); }
#else
INLINE FloatReg max_reg(FloatReg a, FloatReg b) { return a > b ? a : b; }
INLINE FloatReg min_reg(FloatReg a, FloatReg b) { return a < b ? a : b; }
INLINE UintReg max_reg(UintReg a, UintReg b) { return a > b ? a : b; }
#endif
EACH(F32, maximum, (F32 a, F32 b), max_reg(a.reg[i], b.reg[i]))
EACH(F32, minimum, (F32 a, F32 b), min_reg(a.reg[i], b.reg[i]))

EACH(I32, splat_int, (int32_t value), IntReg{} + value)
INLINE I32 lane_numbers() {
    I32 out;
    int32_t numbers[LANES];
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    memcpy(&out, numbers, sizeof out);
    return out;
}
EACH(I32, operator+, (I32 a, I32 b), (IntReg)((UintReg)a.reg[i] + (UintReg)b.reg[i]))  // wraps around
LANEWISE(I32, -, I32)
LANEWISE(I32, *, I32)
LANEWISE(I32, &, I32)
LANEWISE(I32, |, I32)
// Shifts by less than 32; right shifts fill with zeros.
EACH(I32, shift_left, (I32 a, I32 places), a.reg[i] << places.reg[i])
EACH(I32, shift_right, (I32 a, I32 places), (IntReg)((UintReg)a.reg[i] >> (UintReg)places.reg[i]))
INLINE I32 shift_left(I32 a, int places) { return shift_left(a, splat_int(places)); }
INLINE I32 shift_right(I32 a, int places) { return shift_right(a, splat_int(places)); }

EACH(I32, bits_of, (F32 value), (IntReg)value.reg[i])
EACH(F32, floats_of, (I32 bits), (FloatReg)bits.reg[i])
INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

EACH(I32, maximum_unsigned, (I32 a, I32 b), (IntReg)max_reg((UintReg)a.reg[i], (UintReg)b.reg[i]))
EACH(F32, to_float, (I32 value), __builtin_convertvector(value.reg[i], FloatReg))

// Lanes of a where the condition holds, of b elsewhere.
EACH(F32, select, (I32 condition, F32 a, F32 b), condition.reg[i] != 0 ? a.reg[i] : b.reg[i])
EACH(I32, select, (I32 condition, I32 a, I32 b), condition.reg[i] != 0 ? a.reg[i] : b.reg[i])
LANEWISE(I32, <, F32)
LANEWISE(I32, <=, F32)
LANEWISE(I32, <, I32)
LANEWISE(I32, ==, F32)
LANEWISE(I32, ==, I32)
EACH(I32, is_nan, (F32 a), (IntReg)(a.reg[i] != a.reg[i]))
// Bit i is set where lane i of the condition holds.
INLINE uint32_t mask_of(I32 condition) {
    uint32_t mask = 0;
    for (int i = 0; i < REGS; i++) {
#if defined(__AVX512F__)
        mask |= _mm512_movepi32_mask((__m512i)condition.reg[i]);
#elif defined(__AVX2__)
        mask |= (uint32_t)_mm256_movemask_ps((__m256)condition.reg[i]) << (REG_LANES * i);
#else
        for (int lane = 0; lane < REG_LANES; lane++) mask |= (condition.reg[i][lane] & 1u) << (REG_LANES * i + lane);
#endif
    }
    return mask;
}
// Lanes below `count` of `value`, `fill` in the others.
INLINE F32 keep_first(F32 value, int64_t count, float fill) {
    return select(lane_numbers() < splat_int((int32_t)count), value, splat(fill));
}

// Shuffles of a register's lanes I: 0 to REG_LANES - 1.
template <int NEXT, int... I>
struct Lanes : Lanes<NEXT - 1, NEXT - 1, I...> {};
template <int... I>
struct Lanes<0, I...> {
    // The lanes of a and of b without HALF in their numbers, those of b HALF further on; and the others.
    template <int HALF>
    INLINE FloatReg low_halves(FloatReg a, FloatReg b) {
        return __builtin_shufflevector(a, b, (I & HALF ? REG_LANES + I - HALF : I)...);
    }
    template <int HALF>
    INLINE FloatReg high_halves(FloatReg a, FloatReg b) {
        return __builtin_shufflevector(a, b, (I & HALF ? REG_LANES + I : I + HALF)...);
    }
    static constexpr int reversed(int lane) {
        int out = 0;
        for (int bit = 1; bit < REG_LANES; bit *= 2) out = 2 * out + (lane & bit ? 1 : 0);
        return out;
    }
    // Each lane's value goes to the lane STEP apart.
    template <int STEP>
    INLINE FloatReg partners(FloatReg a) {
        return __builtin_shufflevector(a, a, (I ^ STEP)...);
    }
    INLINE FloatReg reverse_bits(FloatReg a) { return __builtin_shufflevector(a, a, reversed(I)...); }
};

// Combines all lanes in one fixed tree: lanes 8 apart, then 4, 2 and 1.
INLINE auto fold(auto value, auto combine) {
#if defined(__AVX512F__)
    auto v = value.reg[0];
    auto low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
    auto high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    auto eight = combine(low, high);
#elif defined(__AVX2__)
    auto eight = combine(value.reg[0], value.reg[1]);
#endif
#if defined(__x86_64__)
    auto four = combine(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
    auto four = combine(combine(value.reg[0], value.reg[2]), combine(value.reg[1], value.reg[3]));
#endif
    four = combine(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
    four = combine(four, __builtin_shufflevector(four, four, 1, 0, 3, 2));
    return four[0];
}
constexpr auto sum_of = [](auto a, auto b) { return a + b; };
constexpr auto larger_of = [](auto a, auto b) { return a > b ? a : b; };
constexpr auto smaller_of = [](auto a, auto b) { return a < b ? a : b; };
INLINE float sum_lanes(F32 value) { return fold(value, sum_of); }
INLINE float max_lanes(F32 value) { return fold(value, larger_of); }
INLINE float min_lanes(F32 value) { return fold(value, smaller_of); }
EACH(U32, without_sign, (I32 value), (UintReg)value.reg[i])
INLINE int32_t max_lanes_unsigned(I32 value) { return (int32_t)fold(without_sign(value), larger_of); }

// Four floats of every fourth row: of four rows with registers of sixteen lanes, of two with eight, of one with four.
INLINE FloatReg load_fours(const float *row, int64_t stride) {
#if defined(__AVX512F__)
    __m512 fours = _mm512_castps128_ps512(_mm_loadu_ps(row));
    fours = _mm512_insertf32x4(fours, _mm_loadu_ps(row + 4 * stride), 1);
    fours = _mm512_insertf32x4(fours, _mm_loadu_ps(row + 8 * stride), 2);
    return (FloatReg)_mm512_insertf32x4(fours, _mm_loadu_ps(row + 12 * stride), 3);
#elif defined(__AVX2__)
    __m256 fours = _mm256_castps128_ps256(_mm_loadu_ps(row));
    return (FloatReg)_mm256_insertf128_ps(fours, _mm_loadu_ps(row + 4 * stride), 1);
#else
    (void)stride;
    return (FloatReg)vld1q_f32(row);
#endif
}

// Within each four lanes: lanes I to L of a (0 to 3) and b (4 to 7).
template <int I, int J, int K, int L>
INLINE FloatReg pick(FloatReg a, FloatReg b) {
#define LANE(first, i) (first) + ((i) < 4 ? (i) : (i) - 4 + REG_LANES)
#define FOUR(first) LANE(first, I), LANE(first, J), LANE(first, K), LANE(first, L)
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, FOUR(0), FOUR(4), FOUR(8), FOUR(12));
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, FOUR(0), FOUR(4));
#else
    return __builtin_shufflevector(a, b, FOUR(0));
#endif
#undef FOUR
#undef LANE
}

// Sixteen floats of each of sixteen rows become sixteen rows of sixteen.
INLINE void transpose(const float *rows, int64_t row_stride, float *target, int64_t target_stride) {
    UNROLL_FOR (int column = 0; column < LANES; column += 4) {
        UNROLL_FOR (int i = 0; i < REGS; i++) {
            FloatReg fours[4];
            const float *first = rows + REG_LANES * i * row_stride + column;
            UNROLL_FOR (int row = 0; row < 4; row++) fours[row] = load_fours(first + row * row_stride, row_stride);
            FloatReg low_01 = pick<0, 4, 1, 5>(fours[0], fours[1]), low_23 = pick<0, 4, 1, 5>(fours[2], fours[3]);
            FloatReg high_01 = pick<2, 6, 3, 7>(fours[0], fours[1]), high_23 = pick<2, 6, 3, 7>(fours[2], fours[3]);
            FloatReg columns[] = {pick<0, 1, 4, 5>(low_01, low_23), pick<2, 3, 6, 7>(low_01, low_23),
                                  pick<0, 1, 4, 5>(high_01, high_23), pick<2, 3, 6, 7>(high_01, high_23)};
            UNROLL_FOR (int k = 0; k < 4; k++)
                memcpy(target + (column + k) * target_stride + REG_LANES * i, &columns[k], sizeof columns[k]);
        }
    }
}

// 2^(n + fraction) for n from -126 to 128 (infinity), the integer in the low bits of `shifted`.
template <int VECTORS>
INLINE void powers_of_two(const F32 (&shifted)[VECTORS], const F32 (&fraction)[VECTORS], F32 (&power)[VECTORS]) {
    // ln(2)^k / k!: the first term left out is below 2e-8 of the result.
    const float terms[] = {1.0f, 0.693147181f, 0.240226507f, 0.0555041087f, 0.00961812911f, 0.00133335581f, 0.000154035304f};
    UNROLL_FOR (int i = 0; i < VECTORS; i++) power[i] = splat(terms[6]);
    UNROLL_FOR (int k = 5; k >= 0; k--)
        UNROLL_FOR (int i = 0; i < VECTORS; i++) power[i] = fma(power[i], fraction[i], splat(terms[k]));
    UNROLL_FOR (int i = 0; i < VECTORS; i++)
        power[i] = power[i] * floats_of(shift_left(bits_of(shifted[i]), 23) + splat_int(127 << 23));
}
constexpr float ROUND_TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits

// 2^x for x up to 127; exactly 1 at 0, exactly 0 below -126, NaN at NaN. Several vectors in step, because each is a chain.
template <int VECTORS>
INLINE void exp2(F32 (&x)[VECTORS]) {
    F32 shifted[VECTORS], fraction[VECTORS], power[VECTORS];
    I32 tiny[VECTORS];
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        tiny[i] = x[i] < splat(-126.0f);  // what the steps below make of such numbers is not used
        shifted[i] = x[i] + splat(ROUND_TO_INTEGER);
        fraction[i] = x[i] - (shifted[i] - splat(ROUND_TO_INTEGER));
    }
    powers_of_two(shifted, fraction, power);
    UNROLL_FOR (int i = 0; i < VECTORS; i++) x[i] = select(tiny[i], splat(0.0f), power[i]);
}
// e^x within two units in the last place; 0 below -87, infinity above 88.4, NaN at NaN.
template <int VECTORS>
INLINE void exp(F32 (&x)[VECTORS]) {
    const F32 log2_e = splat(1.4426950408889634f), log2_e_low = splat(1.925963033500231e-08f);
    F32 shifted[VECTORS], fraction[VECTORS], power[VECTORS];
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        shifted[i] = fma(x[i], log2_e, splat(ROUND_TO_INTEGER));
        const F32 whole = shifted[i] - splat(ROUND_TO_INTEGER);
        fraction[i] = fma(x[i], log2_e_low, fma(x[i], log2_e, -whole));
    }
    powers_of_two(shifted, fraction, power);
    UNROLL_FOR (int i = 0; i < VECTORS; i++) {
        power[i] = select(x[i] < splat(-87.0f), splat(0.0f), power[i]);
        x[i] = select(splat(88.4f) < x[i], splat(__builtin_inff()), power[i]);
    }
}

// silu(gate) * up, or gelu(gate) * up, by tanh. gelu(x) = x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))), silu(x) = x / (1 + exp(-x)).
INLINE F32 gated(F32 gate, F32 up, bool gelu) {
    const F32 first = splat(-1.5957691216057308f), third = splat(-0.071354816272f);
    F32 e[] = {gelu ? gate * (first + third * (gate * gate)) : splat(0.0f) - gate};
    exp(e);
    return gate / (splat(1.0f) + e[0]) * up;
}
