// What encoding and decoding share: the layout of a message, rotation, and the formats as template arguments.
//
// The bytes are those of kernels/spec/block_quant.py, which has the arithmetic; block_format.py has the layout.
#pragma once
#include "../kernels.h"
#include "planes.h"

constexpr int64_t MAX_GROUP = 128;  // a whole number of groups of every format

// Groups of SIZE numbers, whose codes are cut into planes of these WIDTHS.
template <int SIZE, bool IS_FLOAT8, int... WIDTHS>
struct Shape {
    using CodePlanes = Planes<SIZE, 0, WIDTHS...>;
    static constexpr int bits = (WIDTHS + ...), size = SIZE, num_vectors = SIZE / LANES;
    static constexpr bool is_float8 = IS_FLOAT8;
    static constexpr int max_code = (1 << bits) - 1, num_levels = 1 << (bits - 1);
};

// An encoded tensor: its sections. Each has a group's part `group` parts behind its start.
struct Message {
    tw_block_format format;
    int64_t num_groups;
    bool has_zeros;
    char *planes, *scales, *zeros;

    Message(address start, const tw_block_format &format, int64_t num_elems)
        : format(format), num_groups((num_elems + format.group_elems - 1) / format.group_elems) {
        has_zeros = !format.symmetric && !format.float8;
        planes = (char *)start;
        scales = planes + num_groups * format.group_elems / 8 * format.bits;
        zeros = scales + 2 * num_groups;
    }
};

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
            out.reg[i] = fma_reg(value.reg[i], signs, Lanes<REG_LANES>::partners<STEP>(value.reg[i]));
    }
    return out;
}

// A group times the Hadamard matrix of its size: entries 1 and -1, not scaled.
template <int COUNT>
INLINE void rotate(F32 (&x)[COUNT]) {
    constexpr int rounds = COUNT == 8 ? 3 : COUNT == 4 ? 2 : 1;
    UNROLL_FOR (int i = 0; i < COUNT; i++) x[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(x[i]))));
    UNROLL_FOR (int round = 0; round < rounds; round++) {
        const int apart = 1 << round;
        UNROLL_FOR (int i = 0; i < COUNT; i++) {
            if (i & apart) continue;
            F32 a = x[i], b = x[i + apart];
            x[i] = a + b, x[i + apart] = a - b;
        }
    }
}

template <bool IS_FLOAT8, int... WIDTHS>
INLINE auto with_size(int64_t size, auto work) {
    if (size == 128) return work(Shape<128, IS_FLOAT8, WIDTHS...>());
    if (size == 64) return work(Shape<64, IS_FLOAT8, WIDTHS...>());
    return work(Shape<32, IS_FLOAT8, WIDTHS...>());
}
// Calls `work` with the Shape of a format known at run time. The widths are those of kernels/spec/block_format.py.
INLINE auto with_shape(const tw_block_format &format, auto work) {
    if (format.float8) return with_size<true, 8>(format.group_elems, work);
    switch (format.bits) {
        case 8: return with_size<false, 8>(format.group_elems, work);
        case 6: return with_size<false, 4, 2>(format.group_elems, work);
        case 5: return with_size<false, 4, 1>(format.group_elems, work);
        case 4: return with_size<false, 4>(format.group_elems, work);
        case 3: return with_size<false, 2, 1>(format.group_elems, work);
        case 2: return with_size<false, 2>(format.group_elems, work);
        default: __builtin_trap();
    }
}

// Numbers that encode.cpp takes at a time.
constexpr int BLOCK = 1024;

// Encodes `count` float32 `sums`, at most BLOCK, as groups of the message from `group` on. `carried`: null, or of these groups.
typedef void (*EncodeBlock)(const Message &, int64_t group, const char *sums, int64_t count, bool rotates, char *carried);
EncodeBlock block_encoder(const tw_block_format &format);

INLINE char *carried_at(address carried, int64_t first) { return carried ? (char *)carried + BFloat16::size * first : nullptr; }
