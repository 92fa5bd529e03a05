"""Reads and writes the sections of a message (``block_format``) in a Triton kernel.

In ``block_tiles`` numbers that share a byte are at one place of different tiles, so a plane is packed by shifts in each thread.
"""

import triton
import triton.language as tl

from tightwire.kernels.cuda.numbers import from_bf16, from_float8, to_float8

# 1.5 * 2^23: a number of at most 2^22 added to it is rounded to a whole one, to even, which its low bits then hold.
TO_WHOLE = tl.constexpr(12582912.0)
_FLOAT_BASE = tl.constexpr(0x4B000000)  # 2^23, whose last bit is 1
# 2^7, whose bit 16 is 1; made of the other base by a difference, as a second OR would stay.
_SUM_BASE = tl.constexpr(0x43000000)


@triton.jit
def store_plane(target, plane: tl.constexpr, group_B, num_groups, codes, kept_B, finite_B, fmt: tl.constexpr):
    """Pack a plane of ``codes``, whose bits from 8 on are undefined, and store it; 0 for groups that are not finite."""
    width: tl.constexpr = codes[0].shape[1]
    bits: tl.constexpr = fmt.plane_bits[plane]
    shift: tl.constexpr = fmt.plane_shifts[plane]
    size: tl.constexpr = fmt.plane_bytes[plane]
    num_pieces: tl.constexpr = size // width
    section = target + num_groups * fmt.section_offsets[plane]
    for k in tl.static_range(num_pieces):
        packed = _moved(codes[k], shift)
        for f in tl.static_range(1, 8 // bits):
            field = _moved(codes[k + f * num_pieces], shift - bits * f)
            packed = packed + field if fmt.bits == bits else packed & ((1 << bits * f) - 1) | field & (-1 << bits * f)
        places_BW = (group_B * size + k * width)[:, None] + tl.arange(0, width)[None, :]
        # A second store, because selecting one by one takes an instruction each.
        tl.store(section + places_BW, packed.to(tl.uint8), mask=None if kept_B is None else kept_B[:, None])
        lost_B = ~finite_B if kept_B is None else kept_B & ~finite_B
        tl.store(section + places_BW, tl.zeros(places_BW.shape, tl.uint8), mask=lost_B[:, None])


@triton.jit
def _moved(code, shift: tl.constexpr):
    return code >> shift if shift >= 0 else code << -shift


@triton.jit
def _load_plane(source, plane: tl.constexpr, group_B, num_groups, kept_B, fmt: tl.constexpr, width: tl.constexpr):
    """Load the plane's bytes as pieces of the tiles' width: words of four bytes, or float8 numbers."""
    size: tl.constexpr = fmt.plane_bytes[plane]
    section = source + num_groups * fmt.section_offsets[plane]
    pieces = ()
    for k in tl.static_range(size // width):
        places_BW = (group_B * size + k * width)[:, None] + tl.arange(0, width)[None, :]
        piece = tl.load(section + places_BW, mask=None if kept_B is None else kept_B[:, None])
        pieces = pieces + (from_float8(piece) if fmt.float8 else _words(piece),)
    return pieces


@triton.jit
def _words(bytes_BW):
    even, odd = tl.split(tl.reshape(bytes_BW.to(tl.uint32), (bytes_BW.shape[0], bytes_BW.shape[1] // 4, 2, 2)))
    byte_0, byte_2 = tl.split(even)
    byte_1, byte_3 = tl.split(odd)
    return byte_0 | (byte_1 << 8) | (byte_2 << 16) | (byte_3 << 24)


@triton.jit
def load_levels(source, group_B, num_groups, kept_B, fmt: tl.constexpr, num_tiles: tl.constexpr, offset: tl.constexpr):
    """Load codes as float32 tiles of levels plus ``offset``, which is 0 or ``fmt.sum_offset``."""
    width: tl.constexpr = fmt.group_elems // num_tiles
    levels = _load_plane(source, 0, group_B, num_groups, kept_B, fmt, width)
    if not fmt.float8:
        planes = (levels,)
        for p in tl.static_range(1, len(fmt.plane_bits)):
            planes = planes + (_load_plane(source, p, group_B, num_groups, kept_B, fmt, width),)
        # No address is negative, but so the compiler keeps this in a register, and one instruction puts a code into it.
        base = _FLOAT_BASE | (source.to(tl.int64) >> 63).to(tl.uint32)
        pieces, levels = planes[0], ()
        for r in tl.static_range(num_tiles):
            if len(planes) == 1:
                levels = levels + (_floats(pieces[r % len(pieces)], fmt.bits * (r // len(pieces)), base, fmt, offset),)
            else:
                word = pieces[0] & 0
                for p in tl.static_range(len(planes)):
                    field = _moved(
                        planes[p][r % len(planes[p])], fmt.plane_bits[p] * (r // len(planes[p])) - fmt.plane_shifts[p]
                    )
                    word |= field & (0x01010101 * (((1 << fmt.plane_bits[p]) - 1) << fmt.plane_shifts[p]))
                levels = levels + (_floats(word, 0, base, fmt, offset),)
    return levels


@triton.constexpr_function
def _moves(start, bits):
    """Return how far right each byte's bits from ``start`` on go, to be among the 23 bits of a float, and where they are then."""
    moves = [at & 16 if bits == 8 else max(0, at - 16) for at in range(start, start + 32, 8)]
    return [(down, start + 8 * byte - down) for byte, down in enumerate(moves)]


@triton.jit
def _floats(word, start: tl.constexpr, base, fmt: tl.constexpr, offset: tl.constexpr):
    """Return four codes as float32 levels plus ``offset``."""
    moves: tl.constexpr = _moves(start, fmt.bits)
    numbers = ()
    for byte in tl.static_range(4):
        code = (word >> moves[byte][0]) & (fmt.max_code << moves[byte][1])
        if offset and fmt.bits < 8 and moves[byte][1] == 16:
            number = (code | base - (_FLOAT_BASE - _SUM_BASE)).to(tl.float32, bitcast=True)
        else:  # exact: 2^23 and the code times a power of two, less 2^23
            less = offset - fmt.num_levels - 2.0 ** (23 - moves[byte][1])
            number = tl.fma((code | base).to(tl.float32, bitcast=True), 2.0 ** -moves[byte][1], less)
        numbers = numbers + (number,)
    pairs = tl.join(tl.join(numbers[0], numbers[2]), tl.join(numbers[1], numbers[3]))
    return tl.reshape(pairs, (word.shape[0], 4 * word.shape[1]))


@triton.jit
def load_bf16(source, section: tl.constexpr, group_B, num_groups, kept_B, fmt: tl.constexpr):
    """Load (B,) one number per group as float32. Reads bytes, because a message may have an odd address; Triton joins them."""
    place_B2 = (num_groups * fmt.section_offsets[section] + 2 * group_B)[:, None] + tl.arange(0, 2)[None, :]
    bytes_B2 = tl.load(source + place_B2, mask=None if kept_B is None else kept_B[:, None])
    low_B, high_B = tl.split(bytes_B2.to(tl.int32))
    return from_bf16(low_B | (high_B << 8))


@triton.jit
def store_bits(target, section: tl.constexpr, group_B, num_groups, bits_B, kept_B, fmt: tl.constexpr):
    place_B2 = (num_groups * fmt.section_offsets[section] + 2 * group_B)[:, None] + tl.arange(0, 2)[None, :]
    bytes_B2 = tl.join(bits_B, bits_B >> 8).to(tl.uint8)
    tl.store(target + place_B2, bytes_B2, mask=None if kept_B is None else kept_B[:, None])


@triton.jit
def to_codes(tiles, zero_B1, inverse_B1, fmt: tl.constexpr):
    """Round numbers to codes, in units of the scale from the zero: integers whose low 8 bits are the codes'.

    The scale and the zero are rounded outwards, so no number leaves the codes' range by more than float32's rounding,
    and clamping would change nothing. Only symmetric formats have no level for the end opposite to the largest size.
    """
    if fmt.float8:
        return [to_float8(tile * inverse_B1) for tile in tiles]
    else:
        scaled = [(tile - zero_B1 if fmt.has_zeros else tile) * inverse_B1 for tile in tiles]
        if fmt.symmetric:
            scaled = [tl.minimum(number, fmt.num_levels - 1.0) for number in scaled]
        return [(number + (TO_WHOLE + fmt.num_levels)).to(tl.int32, bitcast=True) for number in scaled]
