"""Packed weights on a GPU: matrix products that read blocks once, and the numbers of blocks.

The products are meant for decode rows, whose products are limited by reading the weights: each program computes a tile of the
result, some numbers of the weights' rows at a time. For prefill rows weights are unpacked in memory.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.numbers import INTERPRETED, narrowed, raw, widened
from tightwire.kernels.spec.gguf_block_parts import IQ4_TABLE
from tightwire.kernels.spec.layer_ops import check_linear
from tightwire.kernels.spec.packed import PackedMatrix

_ROWS = tl.constexpr(16)  # rows of a tile: the minimum of matrix units
_OUTPUTS = tl.constexpr(32)
_HALF = tl.constexpr(16)  # numbers that are unpacked together
# Numbers of each output that an iteration multiplies. Their loads are in flight together: an iteration waits once, so its time
# is that of the memory's answer, and with sixteen numbers that was the limit.
_DEPTH = tl.constexpr(128)
_ROWS_MOVED = 4096  # at a time, which bounds the memory
_HALVES = tl.constexpr(128)  # of a program that unpacks: 2048 numbers one after the other
# The table's sixteen bytes as two words.
_IQ4_LOW, _IQ4_HIGH = (
    tl.constexpr(int.from_bytes(bytes(number & 255 for number in IQ4_TABLE[first : first + 8]), "little", signed=True))
    for first in (0, 8)
)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Where a block's codes and scales are, a constant of the compiled kernel.

    A plane's codes are the lowest bits of ``run`` bytes, then their next bits, and so on, then the next bytes (``gguf_block_parts``).
    """

    at: int
    run: int
    bits: int = 4
    high_at: int = 0
    high_run: int = 0
    high_bits: int = 0
    fifths_at: int = 0  # four bytes of fifth bits
    offset: int = 0
    table: bool = False
    scales_at: int = 0
    floats_behind: int = 0  # codes between the scales and the float16s, in bytes

    def planes(self, block_elems: int) -> list[range]:
        """The bytes of each plane of codes in a block; the others are scales."""
        found = [(self.at, block_elems * self.bits // 8), (self.high_at, block_elems * self.high_bits // 8)]
        found.append((self.fifths_at, 4 if self.fifths_at else 0))
        return [range(at, at + num_bytes) for at, num_bytes in found if num_bytes]


_FIELDS = {
    "Q8_0": _Fields(2, 32, bits=8),
    "Q4_0": _Fields(2, 16, offset=8),
    "Q4_1": _Fields(4, 16),
    "Q5_0": _Fields(6, 16, fifths_at=2, offset=16),
    "Q5_1": _Fields(8, 16, fifths_at=4),
    "IQ4_NL": _Fields(2, 16, table=True),
    "MXFP4": _Fields(1, 16, table=True),
    "Q2_K": _Fields(16, 32, bits=2, floats_behind=64),
    "Q3_K": _Fields(32, 32, bits=2, high_at=0, high_run=32, high_bits=1, offset=4, scales_at=96),
    "Q4_K": _Fields(16, 32),
    "Q5_K": _Fields(48, 32, high_at=16, high_run=32, high_bits=1),
    "Q6_K": _Fields(0, 64, high_at=128, high_run=32, high_bits=2, offset=32, scales_at=192),
    "IQ4_XS": _Fields(8, 16, table=True),
}


def order_by_plane(matrix: PackedMatrix) -> PackedMatrix:
    """The same matrix, each plane of a row's codes in one piece and then the scales, moved in place, where nobody else reads.

    A block has 17 to 210 bytes, so where blocks follow each other one to eight of them are loaded at once in most formats. Of a plane sixteen
    are, if the bytes of a row are a multiple of sixteen.
    """
    assert not (matrix.by_plane or matrix.interleaved)
    packed = matrix.format
    planes = _FIELDS[packed.name].planes(packed.block_elems)
    codes = {byte for plane in planes for byte in plane}
    scales = [byte for byte in range(packed.block_bytes) if byte not in codes]
    order_S = torch.tensor(scales, device=matrix.device)
    for rows_OB in matrix.blocks_OB.split(_ROWS_MOVED):
        blocks_OGB = rows_OB.unflatten(1, (-1, packed.block_bytes))
        pieces = [blocks_OGB[:, :, plane.start : plane.stop] for plane in planes]
        pieces.append(blocks_OGB.index_select(2, order_S))
        rows_OB.copy_(torch.cat([piece.flatten(1) for piece in pieces], 1))
    return replace(matrix, by_plane=True)


def linear_packed(
    x_TD: Tensor, weight_OD: PackedMatrix, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``linear.linear_reference`` in ``out_dtype``, by default x's; only the order of the float32 sum differs."""
    check_linear(x_TD, weight_OD, bias_O)
    (num_rows, depth), num_outputs = x_TD.shape, weight_OD.shape[0]
    out_TO = torch.empty(num_rows, num_outputs, dtype=out_dtype or x_TD.dtype, device=x_TD.device)
    num_programs = -(-num_rows // _ROWS.value) * -(-num_outputs // _OUTPUTS.value)
    if num_programs:
        blocks, packed = weight_OD.blocks_OB, weight_OD.format
        halves = blocks if packed.name == "MXFP4" else blocks.view(torch.float16)
        given = x_TD, blocks, halves, x_TD if bias_O is None else bias_O, out_TO
        sizes = num_rows, num_outputs, depth, x_TD.stride(0), blocks.stride(0)
        constants = packed, _FIELDS[packed.name], weight_OD.by_plane, bias_O is not None
        launch(_packed_product, num_programs, x_TD.device, *given, *sizes, *constants)
    return out_TO


def unpack_packed(weight_OD: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a matrix, rounded once to ``dtype``: each block is read once, each number written once."""
    numbers_OD = torch.empty(weight_OD.shape, dtype=dtype, device=weight_OD.device)
    blocks, packed = weight_OD.blocks_OB, weight_OD.format
    num_halves = numbers_OD.numel() // _HALF.value
    if num_halves:
        halves = blocks if packed.name == "MXFP4" else blocks.view(torch.float16)
        sizes = num_halves, weight_OD.shape[1] // _HALF.value, blocks.stride(0)
        num_programs, constants = -(-num_halves // _HALVES.value), (packed, _FIELDS[packed.name], weight_OD.by_plane)
        launch(_unpack, num_programs, weight_OD.device, blocks, halves, numbers_OD, *sizes, *constants)
    return numbers_OD


@triton.jit
def _packed_product(
    x,
    blocks,
    halves,
    bias,
    out,
    num_rows,
    num_outputs,
    depth,
    x_stride,
    row_bytes,
    PACKED: tl.constexpr,
    FIELDS: tl.constexpr,
    BY_PLANE: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Compute one tile. ``halves`` is a float16 view of ``blocks``; scales and minima have even addresses."""
    num_tiles = tl.cdiv(num_outputs, _OUTPUTS)
    row_R = tl.program_id(0) // num_tiles * _ROWS + tl.arange(0, _ROWS)
    output_O = tl.program_id(0) % num_tiles * _OUTPUTS + tl.arange(0, _OUTPUTS)
    kept_R1 = (row_R < num_rows)[:, None]
    column_1D = tl.arange(0, _DEPTH)[None, :]
    x_RD = raw(x) + row_R.to(tl.int64)[:, None] * x_stride + column_1D
    # Halves of sixteen numbers: those of an output follow each other.
    half_P1 = tl.arange(0, _OUTPUTS * (_DEPTH // _HALF))[:, None]
    output_P1 = tl.program_id(0) % num_tiles * _OUTPUTS + half_P1 // (_DEPTH // _HALF)
    column_P1 = half_P1 % (_DEPTH // _HALF) * _HALF
    dtype: tl.constexpr = x.dtype.element_ty
    total_RO = tl.zeros((_ROWS, _OUTPUTS), tl.float32)
    for start in range(0, depth, _DEPTH):
        kept_P1 = (output_P1 < num_outputs) & (start + column_P1 < depth)
        row_P1 = output_P1.to(tl.int64) * row_bytes
        weight_PH = _numbers(blocks, halves, row_P1, start + column_P1, kept_P1, depth, PACKED, FIELDS, BY_PLANE)
        weight_OD = tl.reshape(weight_PH, (_OUTPUTS, _DEPTH))
        x_tile_RD = tl.load(x_RD + start, mask=kept_R1 & (start + column_1D < depth), other=0)
        total_RO = _add_product(x_tile_RD, weight_OD, total_RO, dtype)
    if BIASED:
        total_RO += widened(tl.load(raw(bias) + output_O, mask=output_O < num_outputs, other=0))[None, :]
    place_RO = row_R.to(tl.int64)[:, None] * num_outputs + output_O[None, :]
    tl.store(
        raw(out) + place_RO, narrowed(total_RO, out.dtype.element_ty), mask=kept_R1 & (output_O < num_outputs)[None, :]
    )


@triton.jit
def _unpack(
    blocks, halves, out, count, per_row, row_bytes, PACKED: tl.constexpr, FIELDS: tl.constexpr, BY_PLANE: tl.constexpr
):
    """Unpack ``_HALVES`` times sixteen numbers that follow each other in the result, of which there are ``count`` sixteens."""
    half_O1 = (tl.program_id(0).to(tl.int64) * _HALVES + tl.arange(0, _HALVES))[:, None]
    kept_O1 = half_O1 < count
    start_O1 = (half_O1 % per_row * _HALF).to(tl.int32)
    row_O1, depth = half_O1 // per_row * row_bytes, per_row * _HALF
    weight_OH = _numbers(blocks, halves, row_O1, start_O1, kept_O1, depth, PACKED, FIELDS, BY_PLANE)
    place_OH = half_O1 * _HALF + tl.arange(0, _HALF)[None, :]
    tl.store(raw(out) + place_OH, narrowed(weight_OH, out.dtype.element_ty), mask=kept_O1)


@triton.jit
def _numbers(
    blocks, halves, row_O1, start, kept_O1, depth, PACKED: tl.constexpr, FIELDS: tl.constexpr, BY_PLANE: tl.constexpr
):
    """Sixteen numbers, from ``start`` on, of each row of ``depth`` numbers that begins at byte ``row_O1``, float32."""
    number, block, num_blocks = start % PACKED.block_elems, start // PACKED.block_elems, depth // PACKED.block_elems
    low_bytes: tl.constexpr = PACKED.block_elems * FIELDS.bits // 8
    high_bytes: tl.constexpr = PACKED.block_elems * FIELDS.high_bits // 8
    code_bytes: tl.constexpr = low_bytes + high_bytes + (4 if FIELDS.fifths_at else 0)
    if BY_PLANE:
        low_O1 = row_O1 + block * low_bytes
        high_O1 = row_O1 + num_blocks * low_bytes + block * high_bytes
        fifths_O1 = row_O1 + num_blocks * low_bytes + block * 4
        scales_O1 = row_O1 + num_blocks * code_bytes + block * (PACKED.block_bytes - code_bytes)
    else:
        block_O1 = row_O1 + block * PACKED.block_bytes
        low_O1, high_O1, fifths_O1 = block_O1 + FIELDS.at, block_O1 + FIELDS.high_at, block_O1 + FIELDS.fifths_at
        scales_O1 = block_O1 + FIELDS.scales_at
    codes_OH = _codes(blocks, halves, low_O1, high_O1, fifths_O1, number, kept_O1, PACKED, FIELDS)
    if FIELDS.table:
        numbers_OH = codes_OH.to(tl.float32)
    else:  # the lowest bits of 2^23, which is fewer instructions than a conversion; signed ones from -128 on
        sign: tl.constexpr = 128 if FIELDS.bits == 8 else 0
        numbers_OH = (codes_OH ^ (0x4B000000 + sign)).to(tl.float32, bitcast=True) - (8388608.0 + sign + FIELDS.offset)
    floats_at: tl.constexpr = PACKED.floats_at - FIELDS.scales_at - (FIELDS.floats_behind if BY_PLANE else 0)
    part = number // PACKED.scale_elems
    scale_O1, minimum_O1 = _scales(blocks, halves, scales_O1, part, kept_O1, PACKED, floats_at)
    numbers_OH *= scale_O1
    if PACKED.has_minimum:
        numbers_OH += minimum_O1
    return numbers_OH


@triton.jit
def _plane(blocks, plane_O1, number, kept_O1, run: tl.constexpr, bits: tl.constexpr):
    """Sixteen codes of a block's part of a plane from ``number`` on, int32."""
    in_run: tl.constexpr = run * 8 // bits
    place_O1 = tl.multiple_of(number // in_run * run + number % run, (1, 16))  # Triton does not find that out
    bytes_OH = tl.load(blocks + plane_O1 + place_O1 + tl.arange(0, _HALF)[None, :], mask=kept_O1, other=0).to(tl.int32)
    return bytes_OH >> (bits * (number % in_run // run)) & ((1 << bits) - 1)


@triton.jit
def _codes(blocks, halves, low_O1, high_O1, fifths_O1, number, kept_O1, PACKED: tl.constexpr, FIELDS: tl.constexpr):
    """Sixteen codes of a block from ``number`` on, or what a table has for them, int32. Its planes begin at the bytes given."""
    codes_OH = _plane(blocks, low_O1, number, kept_O1, FIELDS.run, FIELDS.bits)
    if FIELDS.high_bits > 0:
        high_OH = _plane(blocks, high_O1, number, kept_O1, FIELDS.high_run, FIELDS.high_bits)
        codes_OH |= high_OH << FIELDS.bits
    if FIELDS.fifths_at > 0:
        fifths_O1 = tl.load(halves + (fifths_O1 + number // 8) // 2, mask=kept_O1, other=0).to(tl.int16, bitcast=True)
        codes_OH |= (fifths_O1.to(tl.int32) >> tl.arange(0, _HALF)[None, :] & 1) << 4
    if FIELDS.table:
        if PACKED.name == "MXFP4":  # a sign, two bits of exponent and one of mantissa, twice the number
            exponent_OH, last_OH = codes_OH >> 1 & 3, codes_OH & 1
            size_OH = tl.where(exponent_OH == 0, last_OH, (2 | last_OH) << tl.maximum(exponent_OH - 1, 0))
            codes_OH = tl.where(codes_OH >= 8, -size_OH, size_OH)
        else:
            words_OH = tl.where(codes_OH < 8, _IQ4_LOW, _IQ4_HIGH)
            codes_OH = (words_OH >> (8 * (codes_OH % 8)).to(tl.int64)).to(tl.int8).to(tl.int32)
    return codes_OH


@triton.jit
def _byte(blocks, place_O1, kept_O1):
    return tl.load(blocks + place_O1, mask=kept_O1, other=0).to(tl.int32)


@triton.jit
def _scales(blocks, halves, scales_O1, part, kept_O1, PACKED: tl.constexpr, floats_at: tl.constexpr):
    """Scale and minimum (or scale again) of a part of a block, float32. Its scales begin at byte ``scales_O1``."""
    if PACKED.name == "MXFP4":
        exponent_O1 = _byte(blocks, scales_O1, kept_O1)
        bits_O1 = tl.where(exponent_O1 < 2, 0x200000 << tl.minimum(exponent_O1, 1), (exponent_O1 - 1) << 23)
        scale_O1 = bits_O1.to(tl.float32, bitcast=True)
    else:
        scale_O1 = tl.load(halves + (scales_O1 + floats_at) // 2, mask=kept_O1, other=0).to(tl.float32)
    minimum_O1 = scale_O1
    if PACKED.has_minimum:
        minimum_O1 = tl.load(halves + (scales_O1 + floats_at) // 2 + 1, mask=kept_O1, other=0).to(tl.float32)
    if PACKED.name == "Q2_K":
        both_O1 = _byte(blocks, scales_O1 + part, kept_O1)
        scale_O1 *= (both_O1 & 15).to(tl.float32)
        minimum_O1 *= -(both_O1 >> 4).to(tl.float32)
    elif PACKED.name == "Q3_K":
        low_O1 = _byte(blocks, scales_O1 + part % 8, kept_O1) >> (4 * (part // 8)) & 15
        high_O1 = _byte(blocks, scales_O1 + 8 + part % 4, kept_O1) >> (2 * (part // 4)) & 3
        scale_O1 *= ((low_O1 | high_O1 << 4) - 32).to(tl.float32)
    elif PACKED.name == "Q6_K":
        scale_O1 *= _byte(blocks, scales_O1 + part, kept_O1).to(tl.int8).to(tl.float32)
    elif PACKED.name == "IQ4_XS":
        low_O1 = _byte(blocks, scales_O1 + 4 + part // 2, kept_O1) >> (4 * (part % 2)) & 15
        high_O1 = _byte(blocks, scales_O1 + 2 + part // 4, kept_O1) >> (2 * (part % 4)) & 3
        scale_O1 *= ((low_O1 | high_O1 << 4) - 32).to(tl.float32)
    elif PACKED.name == "Q4_K" or PACKED.name == "Q5_K":
        first_O1 = _byte(blocks, scales_O1 + 4 + part % 4, kept_O1)
        second_O1 = _byte(blocks, scales_O1 + 8 + part % 4, kept_O1)
        rest_O1 = _byte(blocks, scales_O1 + 12 + part % 4, kept_O1)
        scale_O1 *= tl.where(part < 4, first_O1 & 63, (rest_O1 & 15) | (first_O1 >> 6) << 4).to(tl.float32)
        minimum_O1 *= -tl.where(part < 4, second_O1 & 63, (rest_O1 >> 4) | (second_O1 >> 6) << 4).to(tl.float32)
    return scale_O1, minimum_O1


@triton.jit
def _add_product(x_RD, weight_OD, total_RO, dtype: tl.constexpr):
    """Return total + x @ weight^T, with x as loaded through ``raw``, and float32 weights rounded to ``dtype``."""
    if dtype == tl.bfloat16:
        if INTERPRETED:  # it multiplies the 16 bits as integers
            x_RD = widened(x_RD)
            weight_OD = widened(narrowed(weight_OD, dtype))
        else:
            x_RD = x_RD.to(tl.bfloat16, bitcast=True)
            weight_OD = weight_OD.to(tl.bfloat16)
    else:
        weight_OD = weight_OD.to(dtype)
    return tl.dot(x_RD, tl.trans(weight_OD), total_RO, input_precision="ieee")
