"""Reads and writes the sections of a block-quantized message (``block_format``) inside a Triton kernel.

Codes come as tiles (``block_tiles``): numbers that share a byte are at one place of different tiles, so a plane is
packed and unpacked by shifts within each thread.
"""

import triton
import triton.language as tl

from tightwire.kernels.cuda.numbers import from_bf16


@triton.jit
def store_plane(target, plane: tl.constexpr, group_B, num_groups, codes, kept_B, finite_B, fmt: tl.constexpr):
    width: tl.constexpr = codes[0].shape[1]
    bits: tl.constexpr = fmt.plane_bits[plane]
    shift: tl.constexpr = fmt.plane_shifts[plane]
    size: tl.constexpr = fmt.plane_bytes[plane]
    num_pieces: tl.constexpr = size // width
    lost_B = ~finite_B if kept_B is None else kept_B & ~finite_B
    section = target + num_groups * fmt.section_offsets[plane]
    for k in tl.static_range(num_pieces):
        packed = _field(codes[k], shift, bits)
        for f in tl.static_range(1, 8 // bits):
            packed |= _field(codes[k + f * num_pieces], shift, bits) << (bits * f)
        places_BW = (group_B * size + k * width)[:, None] + tl.arange(0, width)[None, :]
        tl.store(section + places_BW, packed.to(tl.uint8), mask=None if kept_B is None else kept_B[:, None])
        tl.store(section + places_BW, tl.zeros(places_BW.shape, tl.uint8), mask=lost_B[:, None])


@triton.jit
def _load_plane(source, plane: tl.constexpr, group_B, num_groups, kept_B, fmt: tl.constexpr, num_tiles: tl.constexpr):
    """Load the plane's bytes as int32 pieces of the tiles' width."""
    width: tl.constexpr = fmt.group_elems // num_tiles
    size: tl.constexpr = fmt.plane_bytes[plane]
    section = source + num_groups * fmt.section_offsets[plane]
    pieces = ()
    for k in tl.static_range(size // width):
        places_BW = (group_B * size + k * width)[:, None] + tl.arange(0, width)[None, :]
        piece = tl.load(section + places_BW, mask=None if kept_B is None else kept_B[:, None])
        pieces = pieces + (piece.to(tl.int32),)
    return pieces


@triton.jit
def load_codes(source, group_B, num_groups, kept_B, fmt: tl.constexpr, num_tiles: tl.constexpr):
    planes = ()
    for p in tl.static_range(len(fmt.plane_bits)):
        planes = planes + (_load_plane(source, p, group_B, num_groups, kept_B, fmt, num_tiles),)
    codes = ()
    for r in tl.static_range(num_tiles):
        code = _unpacked(planes[0], r, fmt.plane_bits[0])
        for p in tl.static_range(1, len(fmt.plane_bits)):
            code |= _unpacked(planes[p], r, fmt.plane_bits[p]) << fmt.plane_shifts[p]
        codes = codes + (code,)
    return codes


@triton.jit
def _unpacked(pieces, tile: tl.constexpr, bits: tl.constexpr):
    """Return the bit fields of a plane's bytes that belong to ``tile``."""
    return _field(pieces[tile % len(pieces)], bits * (tile // len(pieces)), bits)


@triton.jit
def _field(code, shift: tl.constexpr, bits: tl.constexpr):
    return code if bits == 8 else (code >> shift) & ((1 << bits) - 1)


@triton.jit
def load_bf16(source, section: tl.constexpr, group_B, num_groups, kept_B, fmt: tl.constexpr):
    """Load (B,) one number per group as float32. Reads single bytes, because a message may have an odd address."""
    place_B = num_groups * fmt.section_offsets[section] + 2 * group_B
    low_B = tl.load(source + place_B, mask=kept_B).to(tl.int32)
    high_B = tl.load(source + place_B + 1, mask=kept_B).to(tl.int32)
    return from_bf16(low_B | (high_B << 8))


@triton.jit
def store_bits(target, section: tl.constexpr, group_B, num_groups, bits_B, kept_B, fmt: tl.constexpr):
    place_B = num_groups * fmt.section_offsets[section] + 2 * group_B
    tl.store(target + place_B, (bits_B & 0xFF).to(tl.uint8), mask=kept_B)
    tl.store(target + place_B + 1, (bits_B >> 8).to(tl.uint8), mask=kept_B)
