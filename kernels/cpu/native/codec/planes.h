// Codes of a group as lanes and as bytes: the planes of kernels/spec/block_format.py, and e4m3 floats.
#pragma once
#include "../numbers.h"

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
            const uint64_t few = load_bits(plane, bytes);
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
        UNROLL_FOR (int byte = 0; byte < step; byte += LANES) {
            I32 packed = splat_int(0);
            UNROLL_FOR (int at = byte; at < SIZE; at += step) {
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

// The planes of a group's codes, low bits first, for the codes' bits from SHIFT on.
template <int SIZE, int SHIFT, int... WIDTHS>
struct Planes {
    Planes(char *, int64_t, int64_t) {}
};
template <int SIZE, int SHIFT, int BITS, int... MORE>
struct Planes<SIZE, SHIFT, BITS, MORE...> {
    using First = Plane<BITS, SIZE>;
    using Others = Planes<SIZE, SHIFT + BITS, MORE...>;
    char *first;
    Others others;

    // Of group `group` of `num_groups`, in a message whose sections begin with these planes at `section`.
    Planes(char *section, int64_t num_groups, int64_t group)
        : first(section + group * First::bytes), others(section + num_groups * First::bytes, num_groups, group) {}
    // Codes of numbers `at` to `at + 15`, without the bits below SHIFT.
    I32 load(int at) const {
        const I32 code = First::load(first, at), placed = SHIFT ? shift_left(code, SHIFT) : code;
        if constexpr (sizeof...(MORE) > 0) return placed | others.load(at);
        return placed;
    }
    void store(const I32 *codes) const {
        First::store(first, codes, SHIFT, sizeof...(MORE) == 0);
        if constexpr (sizeof...(MORE) > 0) others.store(codes);
    }
};

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
