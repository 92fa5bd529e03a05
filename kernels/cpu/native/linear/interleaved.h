// Interleaved rows: sixteen packed rows as tiles, in which each piece of their blocks lies row beside row.
#pragma once
#include "unpack.h"

namespace {

// The fields of sixteen interleaved blocks as lanes, those of register `reg`. A piece at a place of the block is at sixteen times
// that place in the tile.
struct TileSource {
    const char *tile;
    int reg;

    UintReg word(int at) const { return (UintReg)load_reg(tile + LANES * at + sizeof(UintReg) * reg); }
    IntReg byte(int at) const {
        return widen_bytes(load_bits(tile + LANES * at, 8), load_bits(tile + LANES * at + 8, 8)).reg[reg];
    }
    UintReg pair(int at) const { return (UintReg)load_low_halves(tile + LANES * at).reg[reg]; }
    FloatReg half(int at) const { return Float16::load(tile + LANES * at).reg[reg]; }
    static FloatReg to_float(UintReg value) { return __builtin_convertvector((IntReg)value, FloatReg); }
    static FloatReg float_of_bits(IntReg bits) { return (FloatReg)bits; }
};

// The fifth bits of a group: a row's code `number` is at bit number / 4 of byte number % 4, so that a word of codes finds its own
// at one place of each byte. In blocks it is bit `number`.
INLINE uint32_t spread_fifths(uint32_t bits, bool back) {
    uint32_t out = 0;
    for (int number = 0; number < GROUP; number++) {
        const int place = number / 4 + 8 * (number % 4);
        out |= back ? (bits >> place & 1) << number : (bits >> number & 1) << place;
    }
    return out;
}

// Moves the block in `lane` of a tile into the tile, or out of it.
template <class Format, bool INTO>
INLINE void move_block(char *tile, char *block, int64_t lane) {
    for (int at = 0, size; at < Format::num_bytes; at += size) {
        const bool in_words = at >= Format::head_bytes && at < Format::num_bytes - Format::tail_bytes;
        size = in_words ? 4 : Format::head_bytes == 1 ? 1 : 2;
        char *own = tile + LANES * at + size * lane, *other = block + at;
        memcpy(INTO ? own : other, INTO ? other : own, size);
        if (Format::fifths_at && at == Format::fifths_at) {
            char *moved = INTO ? own : other;
            const uint32_t bits = spread_fifths((uint32_t)load_bits(moved, 4), !INTO);
            memcpy(moved, &bits, sizeof bits);
        }
    }
}

// Up to sixteen rows of blocks as a panel of tiles; the lanes of missing rows are zero.
template <class Format>
void interleave_rows(char *panel, const char *blocks, int64_t stride, int64_t num_rows, int64_t num_blocks) {
    if (num_rows < LANES) memset(panel, 0, LANES * Format::num_bytes * num_blocks);
    for (int64_t at = 0; at < num_blocks; at++)
        for (int64_t row = 0; row < num_rows; row++)
            move_block<Format, true>(panel + LANES * Format::num_bytes * at,
                                     (char *)blocks + stride * row + Format::num_bytes * at, row);
}

}  // namespace
