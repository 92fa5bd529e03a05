"""Packed weights on a GPU: matrix products that read blocks once, and the numbers of blocks.

The products are meant for decode rows, whose products are limited by reading the weights: each program computes a tile of the
result, some numbers of the weights' rows at a time. For prefill rows weights are unpacked in memory.
"""

from dataclasses import dataclass

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
_HALVES = tl.constexpr(128)  # of a program that unpacks: 2048 numbers one after the other
# The table's sixteen bytes as two words.
_IQ4_LOW, _IQ4_HIGH = (
    tl.constexpr(int.from_bytes(bytes(number & 255 for number in IQ4_TABLE[first : first + 8]), "little", signed=True))
    for first in (0, 8)
)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Where a block's codes are, a constant of the compiled kernel.

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


_FIELDS = {
    "Q8_0": _Fields(2, 32, bits=8),
    "Q4_0": _Fields(2, 16, offset=8),
    "Q4_1": _Fields(4, 16),
    "Q5_0": _Fields(6, 16, fifths_at=2, offset=16),
    "Q5_1": _Fields(8, 16, fifths_at=4),
    "IQ4_NL": _Fields(2, 16, table=True),
    "MXFP4": _Fields(1, 16, table=True),
    "Q2_K": _Fields(16, 32, bits=2),
    "Q3_K": _Fields(32, 32, bits=2, high_at=0, high_run=32, high_bits=1, offset=4),
    "Q4_K": _Fields(16, 32),
    "Q5_K": _Fields(48, 32, high_at=16, high_run=32, high_bits=1),
    "Q6_K": _Fields(0, 64, high_at=128, high_run=32, high_bits=2, offset=32),
    "IQ4_XS": _Fields(8, 16, table=True),
}


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
        launch(
            _packed_product, num_programs, x_TD.device, *given, *sizes, packed, _FIELDS[packed.name], bias_O is not None
        )
    return out_TO


def unpack_packed(weight_OD: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a matrix, rounded once to ``dtype``: each block is read once, each number written once."""
    numbers_OD = torch.empty(weight_OD.shape, dtype=dtype, device=weight_OD.device)
    blocks, packed = weight_OD.blocks_OB, weight_OD.format
    num_halves = numbers_OD.numel() // _HALF.value
    if num_halves:
        halves = blocks if packed.name == "MXFP4" else blocks.view(torch.float16)
        sizes = num_halves, weight_OD.shape[1] // _HALF.value, blocks.stride(0)
        num_programs = -(-num_halves // _HALVES.value)
        launch(
            _unpack, num_programs, weight_OD.device, blocks, halves, numbers_OD, *sizes, packed, _FIELDS[packed.name]
        )
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
        weight_PH = _numbers(
            blocks, halves, output_P1.to(tl.int64) * row_bytes, start + column_P1, kept_P1, PACKED, FIELDS
        )
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
def _unpack(blocks, halves, numbers, num_halves, row_halves, row_bytes, PACKED: tl.constexpr, FIELDS: tl.constexpr):
    """Unpack ``_HALVES`` times sixteen numbers that follow each other in the result."""
    half_O1 = (tl.program_id(0).to(tl.int64) * _HALVES + tl.arange(0, _HALVES))[:, None]
    kept_O1 = half_O1 < num_halves
    start_O1 = (half_O1 % row_halves * _HALF).to(tl.int32)
    weight_OH = _numbers(blocks, halves, half_O1 // row_halves * row_bytes, start_O1, kept_O1, PACKED, FIELDS)
    place_OH = half_O1 * _HALF + tl.arange(0, _HALF)[None, :]
    tl.store(raw(numbers) + place_OH, narrowed(weight_OH, numbers.dtype.element_ty), mask=kept_O1)


@triton.jit
def _numbers(blocks, halves, row_O1, start, kept_O1, PACKED: tl.constexpr, FIELDS: tl.constexpr):
    """Sixteen numbers, from ``start`` on, of each row that begins at byte ``row_O1``, float32."""
    number = start % PACKED.block_elems
    block_O1 = row_O1 + start // PACKED.block_elems * PACKED.block_bytes
    numbers_OH = _codes(blocks + block_O1, number, kept_O1, PACKED, FIELDS).to(tl.float32)
    scale_O1, minimum_O1 = _scales(blocks, halves, block_O1, number // PACKED.scale_elems, kept_O1, PACKED)
    numbers_OH *= scale_O1
    if PACKED.has_minimum:
        numbers_OH += minimum_O1
    return numbers_OH


@triton.jit
def _plane(block_O1, number, kept_O1, at, run: tl.constexpr, bits: tl.constexpr):
    """Sixteen codes of a plane from ``number`` on, int32."""
    in_run: tl.constexpr = run * 8 // bits
    place = at + number // in_run * run + number % run
    bytes_OH = tl.load(block_O1 + place + tl.arange(0, _HALF)[None, :], mask=kept_O1, other=0).to(tl.int32)
    return bytes_OH >> (bits * (number % in_run // run)) & ((1 << bits) - 1)


@triton.jit
def _codes(block_O1, number, kept_O1, PACKED: tl.constexpr, FIELDS: tl.constexpr):
    """Sixteen codes from ``number`` on, less the offset or looked up, int32."""
    codes_OH = _plane(block_O1, number, kept_O1, FIELDS.at, FIELDS.run, FIELDS.bits)
    if FIELDS.high_bits > 0:
        high_OH = _plane(block_O1, number, kept_O1, FIELDS.high_at, FIELDS.high_run, FIELDS.high_bits)
        codes_OH |= high_OH << FIELDS.bits
    if FIELDS.fifths_at > 0:
        lane_1H = number + tl.arange(0, _HALF)[None, :]
        fifths_OH = tl.load(block_O1 + FIELDS.fifths_at + lane_1H // 8, mask=kept_O1, other=0).to(tl.int32)
        codes_OH |= (fifths_OH >> (lane_1H % 8) & 1) << 4
    if FIELDS.table:
        if PACKED.name == "MXFP4":  # a sign, two bits of exponent and one of mantissa, twice the number
            exponent_OH, last_OH = codes_OH >> 1 & 3, codes_OH & 1
            size_OH = tl.where(exponent_OH == 0, last_OH, (2 | last_OH) << tl.maximum(exponent_OH - 1, 0))
            codes_OH = tl.where(codes_OH >= 8, -size_OH, size_OH)
        else:
            words_OH = tl.where(codes_OH < 8, _IQ4_LOW, _IQ4_HIGH)
            codes_OH = (words_OH >> (8 * (codes_OH % 8)).to(tl.int64)).to(tl.int8).to(tl.int32)
    if FIELDS.bits == 8:
        codes_OH = codes_OH.to(tl.int8).to(tl.int32)
    return codes_OH - FIELDS.offset


@triton.jit
def _byte(blocks, place_O1, kept_O1):
    return tl.load(blocks + place_O1, mask=kept_O1, other=0).to(tl.int32)


@triton.jit
def _scales(blocks, halves, block_O1, part, kept_O1, PACKED: tl.constexpr):
    """Scale and minimum (or scale again) of a part of a block, float32."""
    if PACKED.name == "MXFP4":
        exponent_O1 = _byte(blocks, block_O1, kept_O1)
        bits_O1 = tl.where(exponent_O1 < 2, 0x200000 << tl.minimum(exponent_O1, 1), (exponent_O1 - 1) << 23)
        scale_O1 = bits_O1.to(tl.float32, bitcast=True)
    else:
        scale_O1 = tl.load(halves + (block_O1 + PACKED.floats_at) // 2, mask=kept_O1, other=0).to(tl.float32)
    minimum_O1 = scale_O1
    if PACKED.has_minimum:
        minimum_O1 = tl.load(halves + (block_O1 + PACKED.floats_at) // 2 + 1, mask=kept_O1, other=0).to(tl.float32)
    if PACKED.name == "Q2_K":
        both_O1 = _byte(blocks, block_O1 + part, kept_O1)
        scale_O1 *= (both_O1 & 15).to(tl.float32)
        minimum_O1 *= -(both_O1 >> 4).to(tl.float32)
    elif PACKED.name == "Q3_K":
        low_O1 = _byte(blocks, block_O1 + 96 + part % 8, kept_O1) >> (4 * (part // 8)) & 15
        high_O1 = _byte(blocks, block_O1 + 104 + part % 4, kept_O1) >> (2 * (part // 4)) & 3
        scale_O1 *= ((low_O1 | high_O1 << 4) - 32).to(tl.float32)
    elif PACKED.name == "Q6_K":
        scale_O1 *= _byte(blocks, block_O1 + 192 + part, kept_O1).to(tl.int8).to(tl.float32)
    elif PACKED.name == "IQ4_XS":
        low_O1 = _byte(blocks, block_O1 + 4 + part // 2, kept_O1) >> (4 * (part % 2)) & 15
        high_O1 = _byte(blocks, block_O1 + 2 + part // 4, kept_O1) >> (2 * (part % 4)) & 3
        scale_O1 *= ((low_O1 | high_O1 << 4) - 32).to(tl.float32)
    elif PACKED.name == "Q4_K" or PACKED.name == "Q5_K":
        first_O1 = _byte(blocks, block_O1 + 4 + part % 4, kept_O1)
        second_O1 = _byte(blocks, block_O1 + 8 + part % 4, kept_O1)
        rest_O1 = _byte(blocks, block_O1 + 12 + part % 4, kept_O1)
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
