// Heads of an 8-bit KV cache: kernels/spec/int8_heads.py has the layout and the arithmetic.
#pragma once
#include "../codec/planes.h"

// Sixteen codes as float32.
struct Codes {
    static constexpr int64_t size = 1;
    INLINE F32 load(const char *source) {
        Bytes bytes;
        memcpy(&bytes, source, sizeof bytes);
        const I32 bias = splat_int(128);
        return to_float(widen(bytes ^ (uint8_t)128) - bias);
    }
};
constexpr int64_t SCALE_BYTES = 2;

INLINE int64_t cache_head_bytes(int64_t kind, int64_t head_dim) {
    return kind == INT8_HEADS ? head_dim + SCALE_BYTES : head_dim * size_of(kind);
}

// A token's head, of which `source` has float32, bfloat16 or float16 numbers, as codes and their scale.
template <class Number>
INLINE void quantize_head(const char *source, int64_t size, char *codes, char *scale) {
    I32 largest = splat_int(0);
    for (int64_t at = 0; at < size; at += LANES) {
        const F32 value = load_numbers<Number>(source + Number::size * at, size - at);
        largest = maximum_unsigned(largest, bits_of(value) & splat_int(0x7FFFFFFF));
    }
    const uint32_t top = (uint32_t)max_lanes_unsigned(largest);
    const bool finite = top < 0x7F800000;
    const float exact = float_of(top) / 127.0f, normal = exact > 0x1p-126f ? exact : 0x1p-126f;
    const uint32_t bits = finite ? (bits_of(normal) + 0xFFFF) >> 16 : 0x7FC0;  // rounded up to bfloat16
    const F32 inverse = splat(1.0f / float_of(bits << 16));
    for (int64_t at = 0; at < size; at += LANES) {
        const int64_t left = size - at;
        const F32 value = load_numbers<Number>(source + Number::size * at, left);
        const Bytes bytes = low_bytes(finite ? bits_of(value * inverse + splat(ROUND_TO_INTEGER)) : splat_int(0));
        memcpy(codes + at, &bytes, least(left, LANES));
    }
    memcpy(scale, &bits, SCALE_BYTES);
}
INLINE F32 load_scale(const char *scale) { return splat(float_of(load_u16(scale) << 16)); }
