// Numbers of packed blocks as float32, or as bfloat16 in pairs.
//
// They are made by the same instructions wherever they are used, so a product has the same bits whether its weights are unpacked
// before or on the way.
#pragma once
#include "formats.h"

// The fields of a block as numbers.
struct BlockSource {
    const char *block;

    uint32_t byte(int at) const { return (uint8_t)block[at]; }
    float half(int at) const {
#if defined(__x86_64__)
        // As an integer: a float16 alone goes through a register with a false dependency.
        return _mm_cvtph_ps(_mm_cvtsi32_si128((int32_t)load_bits(block + at, 2)))[0];
#else
        __fp16 value;
        memcpy(&value, block + at, sizeof value);
        return (float)value;
#endif
    }
    static float float_of_bits(uint32_t bits) { return float_of(bits); }
};

// Makes the compiler read `value` from memory afterwards. A CPU with AVX2 loads one number for all lanes, or widens bytes that it
// loads, in half a cycle; from a register it takes one to two.
INLINE void keep_in_memory([[maybe_unused]] auto &value) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+m"(value));
#endif
}

// Scales and minima of a run of groups: of a block, or of up to sixteen blocks of one group with both, whose conversion one by one
// takes as long as all the rest (CPUs without AVX-512 take them one by one).
template <class Format>
struct Scales {
    static constexpr bool gathers = LANES == REG_LANES && Format::num_groups == 1 && Format::has_minimum;
    static constexpr int run_groups = gathers ? LANES : Format::num_groups;
    alignas(64) float scales[LANES], minima[LANES];

    void read(const char *block, [[maybe_unused]] int64_t num_groups) {
        if constexpr (Format::num_groups > 1) {
            const BlockSource source = {block};
            I32 scale, minimum;
            Format::integers(block, scale, minimum);
            store(scales, to_float(scale) * splat(source.half(Format::floats_at)));
            if constexpr (Format::has_minimum) store(minima, to_float(minimum) * splat(-source.half(Format::floats_at + 2)));
            keep_in_memory(scales), keep_in_memory(minima);
        } else if constexpr (gathers) {
#if defined(__AVX512F__)
            const __m512i places = (__m512i)(lane_numbers().reg[0] * Format::num_bytes);
            const auto used = (1 << num_groups) - 1;  // a block begins with the float16 of its scale, then of its minimum
            const __m512i heads = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), used, places, block, 1);
            _mm512_store_ps(scales, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(heads)));
            _mm512_store_ps(minima, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(heads, 16))));
#endif
        } else {
            scales[0] = Format::scale(BlockSource{block}, 0);
            if constexpr (Format::has_minimum) minima[0] = Format::minimum(BlockSource{block}, 0);
        }
    }
    // The numbers of a part that codes without their offset stand for.
    FloatReg numbers(IntReg codes, int64_t part) const {
        const FloatReg wide = __builtin_convertvector(codes, FloatReg), scale = splat_reg(scales[part]);
        if constexpr (Format::has_minimum) return fma_reg(wide, scale, splat_reg(minima[part]));
        return wide * scale;
    }
};

// Calls `work(first, group)` for each group of a run: group `group` from `first` on. Of blocks of one group two that follow each other
// have the same `first`, so that they share what is computed for both.
template <class Format>
INLINE void with_groups(int64_t num_groups, auto work) {
    if constexpr (!Scales<Format>::gathers) {
        UNROLL_FOR (unsigned group = 0; group < Format::num_groups; group++) work(0, group);
    } else {
        _Pragma("GCC unroll 1") for (int64_t first = 0; first < num_groups; first += 2) {
            work(first, 0u);
            if (first + 1 < num_groups) work(first, 1u);
        }
    }
}

// Codes of a group, a byte each.
typedef uint8_t Codes __attribute__((vector_size(GROUP)));
typedef uint16_t CodePairs __attribute__((vector_size(GROUP)));  // for shifts: no CPU shifts bytes

constexpr uint64_t EIGHT_BITS = 0x8040201008040201, FIFTH_BITS[] = {EIGHT_BITS, EIGHT_BITS, EIGHT_BITS, EIGHT_BITS};

// A plane's codes of a group, `up` bits further up.
template <class P>
INLINE Codes plane_codes(const char *block, unsigned group, int up) {
    CodePairs stored;
    const int shift = P::shift(GROUP * group);
    const uint8_t mask = ((1 << P::bits) - 1) << up;
    if constexpr (P::in_run == GROUP && P::bits == 4) {  // the second half is in the same bytes
#if defined(__x86_64__)
        const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(block + P::place(GROUP * group))));
        stored = (CodePairs)_mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
#else
        for (int half = 0; half < 2; half++) memcpy((char *)&stored + LANES * half, block + P::place(GROUP * group), LANES);
        for (int i = GROUP / 4; i < GROUP / 2; i++) stored[i] >>= 4;
#endif
        return (Codes)stored & mask;
    }
    memcpy(&stored, block + P::place(GROUP * group), GROUP);
    if constexpr (P::bits == 8) return (Codes)stored;
    return (Codes)(shift > up ? stored >> (shift - up) : stored << (up - shift)) & mask;
}
template <class Format>
INLINE Codes group_codes(const char *block, unsigned group) {
    Codes codes = plane_codes<typename Format::Low>(block, group, 0);
    if constexpr (Format::High::bits > 0) codes |= plane_codes<typename Format::High>(block, group, Format::Low::bits);
    if constexpr (Format::fifths_at > 0) {
        const uint32_t fifths = load_bits(block + Format::fifths_at, 4);
#if defined(__AVX512F__)
        codes = (Codes)_mm256_mask_add_epi8((__m256i)codes, fifths, (__m256i)codes, _mm256_set1_epi8(16));
#else
        Codes bits, spread;  // each byte of the fifth bits eight times
        memcpy(&bits, FIFTH_BITS, sizeof bits);
#if defined(__AVX2__)
        const __m256i bytes = _mm256_setr_epi64x(0, EACH_BYTE, 2 * EACH_BYTE, 3 * EACH_BYTE);
        spread = (Codes)_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)fifths), bytes);
#else
        for (int i = 0; i < GROUP; i++) spread[i] = fifths >> i / 8 * 8;
#endif
        codes |= (Codes)((spread & bits) == bits) & 16;
#endif
    }
    return codes;
}
// What the codes stand for.
template <class Format>
INLINE Codes group_integers(const char *block, unsigned group) {
    Codes codes = group_codes<Format>(block, group);
    if constexpr (Format::table != nullptr) codes = look_up<Format>(codes);
    return codes - Format::offset;
}

// REG_LANES bytes as lanes.
template <class Byte = int8_t>
INLINE IntReg load_bytes(const char *bytes) {
    constexpr bool has_sign = (Byte)-1 < 0;
#if defined(__AVX512F__)
    const __m128i stored = _mm_loadu_si128((const __m128i *)bytes);
    return (IntReg)(has_sign ? _mm512_maskz_cvtepi8_epi32(0xFFFF, stored) : _mm512_maskz_cvtepu8_epi32(0xFFFF, stored));
#elif defined(__AVX2__)
    const __m128i stored = _mm_loadl_epi64((const __m128i *)bytes);
    return (IntReg)(has_sign ? _mm256_cvtepi8_epi32(stored) : _mm256_cvtepu8_epi32(stored));
#else
    IntReg lanes;
    for (int lane = 0; lane < REG_LANES; lane++) lanes[lane] = (Byte)bytes[lane];
    return lanes;
#endif
}
// The codes of a register, `at` codes from the start.
INLINE IntReg code_lanes(const Codes &codes, int at) {
#if defined(__AVX512F__)
    const __m256i all = (__m256i)codes;
    return (IntReg)_mm512_maskz_cvtepi8_epi32(0xFFFF, at ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all));
#else
    return load_bytes((const char *)&codes + at);
#endif
}

// Whether two codes of a byte are widened together, which is cheaper on narrow registers: those of a group, or of two.
template <class Format>
constexpr bool widens_pairs = !WIDE && Format::Low::bits == 4 && !Format::High::bits && !Format::fifths_at && !Format::table;

// The codes of a group of a run where they are not widened as they lie.
template <class Format>
INLINE void read_group(Codes &codes, const char *run, int64_t first, unsigned group) {
    if constexpr (Format::Low::bits < 8 && !widens_pairs<Format>) {
        codes =
            group_integers<Format>(run + (first + group / Format::num_groups) * Format::num_bytes, group % Format::num_groups);
        keep_in_memory(codes);
    }
}
// Calls `work(at, numbers)` for each register of a group of a run, `at` numbers from the group's start; `codes` are of read_group.
template <class Format>
INLINE void with_group([[maybe_unused]] const Codes &codes, const char *run, const Scales<Format> &scales, int64_t first,
                       unsigned group, auto work) {
    using Low = typename Format::Low;
    const auto scaled = [&](int at, IntReg integers) {
        work(at, scales.numbers(integers, first + (GROUP * group + at) / (GROUP / Format::num_parts)));
    };
    const char *stored =
        run + (first + group / Format::num_groups) * Format::num_bytes + Low::place(GROUP * (group % Format::num_groups));
    if constexpr (Low::bits == 8) {
        UNROLL_FOR (int at = 0; at < GROUP; at += REG_LANES) scaled(at, load_bytes(stored + at));
    } else if constexpr (widens_pairs<Format>) {
        constexpr int num_bytes = Low::in_run / 2;
        if (num_bytes == GROUP && group % 2) return;  // done with the group before
        UNROLL_FOR (int lane = 0; lane < LANES; lane += REG_LANES) {
            IntReg both[num_bytes / LANES];
            UNROLL_FOR (int i = 0; i < num_bytes / LANES; i++) {
                both[i] = load_bytes<uint8_t>(stored + LANES * i + lane);
                scaled(LANES * i + lane, (both[i] & 15) - Format::offset);
            }
            UNROLL_FOR (int i = 0; i < num_bytes / LANES; i++)
                scaled(num_bytes + LANES * i + lane, (both[i] >> 4) - Format::offset);
        }
    } else {
        UNROLL_FOR (int at = 0; at < GROUP; at += REG_LANES) scaled(at, code_lanes(codes, at));
    }
}

#if defined(__AVX512BF16__)
// The 32 numbers of a group of a run rounded to bfloat16, in order.
template <class Format>
INLINE __m512i group_pairs(const char *run, const Scales<Format> &scales, int64_t first, unsigned group) {
    constexpr int bits = Format::Low::bits + Format::High::bits + (Format::fifths_at > 0);
    const char *block = run + (first + group / Format::num_groups) * Format::num_bytes;
    FloatReg numbers[2];
    if constexpr (Format::num_parts == 1 && bits <= 5) {
        // All numbers of such codes are computed once, then looked up: the lookup takes five bits, with four those of two groups.
        UNROLL_FOR (int upper = 0; upper < 2; upper++) {
            const int64_t own = first + (bits == 4 ? (group / 2 * 2 + upper) % Scales<Format>::run_groups : group);
            UintReg codes = (UintReg)lane_numbers().reg[0] + (bits == 5 ? 16 * upper : 0);
            if constexpr (Format::table != nullptr) codes = (UintReg)((IntReg)(look_up<Format>(codes) << 24) >> 24);
            numbers[upper] = scales.numbers((IntReg)codes - Format::offset, own);
        }
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
        const Codes codes = group_codes<Format>(block, group % Format::num_groups) | (uint8_t)(bits == 4 ? group % 2 << 4 : 0);
        return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16((__m256i)codes), table);
    }
    if constexpr (Format::num_parts == 2 && bits <= 3) {
        // Likewise, of as many parts as a register has room for.
        constexpr unsigned parts = 32 >> bits;
        UNROLL_FOR (int i = 0; i < 2; i++) {
            const UintReg number = (UintReg)lane_numbers().reg[0] + LANES * i;
            const __m512i part = (__m512i)((number >> bits) + 2 * group / parts * parts);
            numbers[i] = __builtin_convertvector((IntReg)(number & ((1 << bits) - 1)) - Format::offset, FloatReg);
            const FloatReg scale = (FloatReg)_mm512_permutexvar_ps(part, _mm512_load_ps(scales.scales));
            if constexpr (Format::has_minimum)
                numbers[i] = fma_reg(numbers[i], scale, (FloatReg)_mm512_permutexvar_ps(part, _mm512_load_ps(scales.minima)));
            else
                numbers[i] = numbers[i] * scale;
        }
        const __m512i table = (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
        Codes codes = group_codes<Format>(block, group) | (uint8_t)(2 * group % parts << bits);
        const __m256i second = _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi8(1 << bits), 1);
        return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16((__m256i)codes | second), table);
    }
    Codes codes;
    read_group<Format>(codes, run, first, group);
    with_group(codes, run, scales, first, group, [&](int at, FloatReg those) { numbers[at / LANES] = those; });
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)numbers[1], (__m512)numbers[0]);
}
#endif

// Groups that follow each other, whole blocks of them, as float32, or as bfloat16 if `PAIR`. Asks for memory further on, where the
// next rows mostly are: without it a Zen 5 core reads 6 to 10 GB/s here, as each panel starts far from the one before.
constexpr int UNPACK_AHEAD = 8192;
template <class Format, bool PAIR>
INLINE void unpack_groups(char *target, const char *source, int64_t num_groups, const char *ahead) {
    for (int64_t count; num_groups > 0; num_groups -= count) {
        count = least(Scales<Format>::run_groups, num_groups);
        const int64_t num_bytes = count / Format::num_groups * Format::num_bytes;
        for (int64_t line = 0; line < num_bytes; line += 64) prefetch(ahead + line);
        Scales<Format> scales;
        scales.read(source, count);
        with_groups<Format>(count, [&](int64_t first, unsigned group) {
            char *numbers = target + (PAIR ? 2 : 4) * GROUP * (first + group);
            if constexpr (PAIR) {
#if defined(__AVX512BF16__)
                _mm512_storeu_si512(numbers, group_pairs(source, scales, first, group));
#endif
            } else {
                Codes codes;
                read_group<Format>(codes, source, first, group);
                with_group(codes, source, scales, first, group,
                           [&](int at, FloatReg those) { memcpy(numbers + 4 * at, &those, sizeof those); });
            }
        });
        target += (PAIR ? 2 : 4) * GROUP * count, source += num_bytes, ahead += num_bytes;
    }
}
