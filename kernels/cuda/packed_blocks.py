"""Reads the blocks of packed matrices in Triton kernels: where a format has its codes and scales, and what they stand for."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tightwire.kernels.spec.gguf_blocks import IQ4_TABLE, MXFP4_TABLE, PackedFormat
from tightwire.kernels.spec.packed import PackedMatrix

_ROWS_MOVED = 4096  # at a time, which bounds the memory
_MOST_PIECE_ELEMS = 128  # which bounds the registers
_MXFP4 = tl.constexpr(sum(size << 4 * code for code, size in enumerate(MXFP4_TABLE[:8])) - (1 << 32))
# The table's sixteen bytes as two words.
_IQ4_LOW, _IQ4_HIGH = (
    tl.constexpr(int.from_bytes(bytes(number & 255 for number in IQ4_TABLE[first : first + 8]), "little", signed=True))
    for first in (0, 8)
)


@dataclass(frozen=True, slots=True)
class Section:
    """Where blocks have something: block i of n at byte ``before * n + stride * i + at`` of a row."""

    before: int
    stride: int
    at: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How kernels read the rows of a packed matrix, a constant of compiled ones, which are kept by what its fields say.

    They take pieces: ``width`` bytes of low bits from each phase of a unit, so some parts of ``width`` numbers that follow each other and
    share a scale. All pieces shift their parts alike, or Triton would move codes between threads. So a unit has as many numbers as a
    run of any plane.
    """

    packed: PackedFormat
    by_plane: bool
    low: Section
    high: Section
    fifths: Section
    scales: Section
    floats_at: int  # bytes from the scales to the float16s
    width: int
    run_elems: int
    unit: int
    phase_bytes: int
    phase_elems: int  # numbers from one phase to the next
    num_phases: int
    scale_step: int  # numbers of a unit for which a piece has one scale
    piece_elems: int
    num_pieces: int  # those of an iteration, one for each warp


def layout_of(packed: PackedFormat, by_plane: bool, *, few_programs: bool = False) -> BlockLayout:
    codes, planes, scales = packed.codes, packed.codes.planes(packed.block_elems), scale_bytes(packed)

    def section(at: int) -> Section:
        """The section of the plane that begins at byte ``at`` of a block, or of the scales."""
        if not by_plane:
            return Section(0, packed.block_bytes, at)
        pieces = [(plane.start, len(plane)) for plane in planes] + [(scales[0], len(scales))]
        number = next((number for number, (start, _) in enumerate(pieces) if start == at), 0)
        return Section(sum(size for _, size in pieces[:number]), pieces[number][1], 0)

    run_elems, high_run = codes.run * 8 // codes.bits, codes.high_run or codes.run
    unit, phase_bytes = max(run_elems, codes.high_run * 8 // (codes.high_bits or 8)), min(codes.run, high_run)
    num_phases = unit * codes.bits // 8 // phase_bytes
    num_parts = num_phases * 8 // codes.bits
    width = min(codes.run, packed.scale_elems, _MOST_PIECE_ELEMS // num_parts)
    piece_elems = width * num_parts
    return BlockLayout(
        packed,
        by_plane,
        *(section(at) for at in (codes.at, codes.high_at, codes.fifths_at, scales[0])),
        floats_at=scales.index(packed.floats_at) if by_plane else packed.floats_at - scales[0],
        width=width,
        run_elems=run_elems,
        unit=unit,
        phase_bytes=phase_bytes,
        phase_elems=phase_bytes if phase_bytes < codes.run else run_elems,
        num_phases=num_phases,
        scale_step=max(phase_bytes, packed.scale_elems),
        piece_elems=piece_elems,
        num_pieces=(8 if piece_elems <= 64 else 4) * (1 + few_programs),
    )


def scale_bytes(packed: PackedFormat) -> list[int]:
    """The bytes of a block that no plane has."""
    codes = {byte for plane in packed.codes.planes(packed.block_elems) for byte in plane}
    return [byte for byte in range(packed.block_bytes) if byte not in codes]


def order_by_plane(matrix: PackedMatrix) -> PackedMatrix:
    """The same matrix, each plane of a row's codes in one piece and then the scales, moved in place, where nobody else reads.

    A block has 17 to 210 bytes, so where blocks follow each other one to eight of them are loaded at once in most formats. Of a plane sixteen
    are, if the bytes of a row are a multiple of sixteen.
    """
    assert not (matrix.by_plane or matrix.interleaved)
    packed = matrix.format
    order_S = torch.tensor(scale_bytes(packed), device=matrix.device)
    for rows_OB in matrix.blocks_OB.split(_ROWS_MOVED):
        blocks_OGB = rows_OB.unflatten(1, (-1, packed.block_bytes))
        pieces = [blocks_OGB[:, :, plane.start : plane.stop] for plane in packed.codes.planes(packed.block_elems)]
        pieces.append(blocks_OGB.index_select(2, order_S))
        rows_OB.copy_(torch.cat([piece.flatten(1) for piece in pieces], 1))
    return replace(matrix, by_plane=True)


@triton.jit
def find_piece(blocks, row, piece, kept, depth, LAYOUT: tl.constexpr):
    """Find a piece of each row that begins at byte ``row``: its first number in the row and in its block, where its low bits of the
    first phase, its fifth bits and its scales begin, and the bytes with its high bits.
    """
    CODES: tl.constexpr = LAYOUT.packed.codes
    of_unit: tl.constexpr = LAYOUT.phase_bytes // LAYOUT.width
    of_block: tl.constexpr = LAYOUT.packed.block_elems // LAYOUT.unit
    unit, place = piece // of_unit, piece % of_unit * LAYOUT.width
    block, in_block, num_blocks = unit // of_block, unit % of_block, depth // LAYOUT.packed.block_elems
    LOW: tl.constexpr = LAYOUT.low
    HIGH: tl.constexpr = LAYOUT.high
    FIFTHS: tl.constexpr = LAYOUT.fifths
    SCALES: tl.constexpr = LAYOUT.scales
    low = _at(row, block, num_blocks, LOW)
    low += in_block * (LAYOUT.num_phases * LAYOUT.phase_bytes) + place
    fifths = _at(row, block, num_blocks, FIFTHS)
    scales = _at(row, block, num_blocks, SCALES)
    high = low
    if CODES.high_bits > 0:
        high = _at(row, block, num_blocks, HIGH) + in_block * (LAYOUT.unit * CODES.high_bits // 8) + place
        high = load_bytes(blocks, high, kept, LAYOUT.width)
    return unit * LAYOUT.unit + place, in_block * LAYOUT.unit + place, low, fifths, scales, high


@triton.jit
def _at(row, block, num_blocks, SECTION: tl.constexpr):
    return row + num_blocks * SECTION.before + block * SECTION.stride + SECTION.at


@triton.jit
def load_bytes(blocks, first, kept, width: tl.constexpr):
    """``width`` bytes from each ``first`` on."""
    return tl.load(blocks + first + tl.arange(0, width), mask=kept, other=0)


@triton.jit
def find_codes(low, high, halves, fifths, number, kept, IN_UNIT: tl.constexpr, LAYOUT: tl.constexpr):
    """The codes of a piece's part ``IN_UNIT`` numbers behind its start less their offset, or what a table has for them, float32.

    ``low`` and ``high``: the bytes with their bits. ``number``: the first one in the block.
    """
    CODES: tl.constexpr = LAYOUT.packed.codes
    codes = low.to(tl.int16) >> IN_UNIT // CODES.run * CODES.bits % 8 & ((1 << CODES.bits) - 1)
    if CODES.high_bits > 0:
        shift: tl.constexpr = IN_UNIT // CODES.high_run * CODES.high_bits
        codes |= (high.to(tl.int16) >> shift & ((1 << CODES.high_bits) - 1)) << CODES.bits
    if CODES.fifths_at > 0:
        bits = tl.load(halves + (fifths + number // 16 * 2) // 2, mask=kept, other=0).to(tl.int16, bitcast=True)
        codes |= (bits >> tl.arange(0, LAYOUT.width).to(tl.int16) & 1) << 4
    if len(CODES.table) > 0:
        if LAYOUT.packed.name == "MXFP4":  # a sign and three bits that stand for twice the number
            sizes = (tl.full((), _MXFP4, tl.int32) >> (codes % 8 * 4) & 15).to(tl.int16)
            codes = tl.where(codes >= 8, -sizes, sizes)
        else:
            words = tl.where(codes < 8, _IQ4_LOW, _IQ4_HIGH)
            codes = (words >> (8 * (codes % 8)).to(tl.int64)).to(tl.int8).to(tl.int16)
        return codes.to(tl.float32)
    else:  # the lowest bits of 2^23, which is fewer instructions than a conversion; signed ones from -128 on
        sign: tl.constexpr = 128 if CODES.bits == 8 else 0
        float_bits = codes.to(tl.int32) ^ (0x4B000000 + sign)
        return float_bits.to(tl.float32, bitcast=True) - (8388608.0 + sign + CODES.offset)


@triton.jit
def _byte(blocks, place, kept):
    return tl.load(blocks + place, mask=kept, other=0).to(tl.int32)


@triton.jit
def load_scales(blocks, halves, scales, number, kept, LAYOUT: tl.constexpr):
    """Scale and minimum (or scale again) at ``number`` of a block, float32. Its scales begin at byte ``scales``."""
    name: tl.constexpr = LAYOUT.packed.name
    part, floats = number // LAYOUT.packed.scale_elems, (scales + LAYOUT.floats_at) // 2
    if name == "MXFP4":
        exponent = _byte(blocks, scales, kept)
        bits = tl.where(exponent < 2, 0x200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(halves + floats, mask=kept, other=0).to(tl.float32)
    minimum = scale
    if LAYOUT.packed.has_minimum:
        minimum = tl.load(halves + floats + 1, mask=kept, other=0).to(tl.float32)
    if name == "Q2_K":
        both = _byte(blocks, scales + part, kept)
        scale *= (both & 15).to(tl.float32)
        minimum *= -(both >> 4).to(tl.float32)
    elif name == "Q3_K":
        low = _byte(blocks, scales + part % 8, kept) >> (4 * (part // 8)) & 15
        high = _byte(blocks, scales + 8 + part % 4, kept) >> (2 * (part // 4)) & 3
        scale *= ((low | high << 4) - 32).to(tl.float32)
    elif name == "Q6_K":
        scale *= _byte(blocks, scales + part, kept).to(tl.int8).to(tl.float32)
    elif name == "IQ4_XS":
        low = _byte(blocks, scales + 4 + part // 2, kept) >> (4 * (part % 2)) & 15
        high = _byte(blocks, scales + 2 + part // 4, kept) >> (2 * (part % 4)) & 3
        scale *= ((low | high << 4) - 32).to(tl.float32)
    elif name == "Q4_K" or name == "Q5_K":
        first = _byte(blocks, scales + 4 + part % 4, kept)
        second = _byte(blocks, scales + 8 + part % 4, kept)
        rest = _byte(blocks, scales + 12 + part % 4, kept)
        scale *= tl.where(part < 4, first & 63, (rest & 15) | (first >> 6) << 4).to(tl.float32)
        minimum *= -tl.where(part < 4, second & 63, (rest >> 4) | (second >> 6) << 4).to(tl.float32)
    return scale, minimum
