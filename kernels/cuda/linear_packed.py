"""Packed weights on a GPU: matrix products that read blocks once, and the numbers of blocks.

The products are meant for decode rows, whose products are limited by reading the weights: each program computes a tile of the
result, some numbers of the weights' rows at a time. For prefill rows weights are unpacked in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.numbers import INTERPRETED, load_operand, narrowed, raw, widened
from tightwire.kernels.cuda.packed_blocks import (
    BlockLayout,
    as_floats,
    find_codes,
    find_piece,
    load_bytes,
    load_scales,
)
from tightwire.kernels.spec.layer_ops import check_linear
from tightwire.kernels.spec.packed import PackedMatrix

_ROWS = tl.constexpr(16)  # rows of a tile: the minimum of matrix units
_OUTPUTS = tl.constexpr(32)
_MAX_REGISTERS = 128  # of a thread: two programs of eight warps are on a processor
_UNPACKED = tl.constexpr(128)  # pieces of a program that unpacks


def linear_packed(
    x_TD: Tensor, weight_OD: PackedMatrix, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``linear.linear_reference`` in ``out_dtype``, by default x's; weights are not rounded, and the order of the float32 sum differs."""
    check_linear(x_TD, weight_OD, bias_O)
    (num_rows, depth), num_outputs = x_TD.shape, weight_OD.shape[0]
    out_TO = torch.empty(num_rows, num_outputs, dtype=out_dtype or x_TD.dtype, device=x_TD.device)
    num_programs = -(-num_rows // _ROWS.value) * -(-num_outputs // _OUTPUTS.value)
    if num_programs:
        layout = BlockLayout(weight_OD.format, weight_OD.by_plane)
        given = x_TD, *_views(weight_OD), x_TD if bias_O is None else bias_O, out_TO
        sizes = num_rows, num_outputs, depth, x_TD.stride(0), weight_OD.blocks_OB.stride(0)
        num_pieces, num_stages = tiling(layout, x_TD.dtype)
        options = {"num_warps": num_pieces, "num_stages": num_stages, "maxnreg": _MAX_REGISTERS}
        constants = layout, num_pieces, bias_O is not None
        launch(_packed_product, num_programs, x_TD.device, *given, *sizes, *constants, **options)
    return out_TO


def unpack_packed(weight_OD: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a matrix, rounded once to ``dtype``: each block is read once, each number written once."""
    numbers_OD = torch.empty(weight_OD.shape, dtype=dtype, device=weight_OD.device)
    layout = BlockLayout(weight_OD.format, weight_OD.by_plane)
    of_row = weight_OD.shape[1] // layout.piece_elems
    if num_pieces := len(numbers_OD) * of_row:
        sizes = num_pieces, of_row, weight_OD.shape[1], weight_OD.blocks_OB.stride(0)
        num_programs = -(-num_pieces // _UNPACKED.value)
        launch(_unpack, num_programs, weight_OD.device, *_views(weight_OD), numbers_OD, *sizes, layout)
    return numbers_OD


def _views(weight_OD: PackedMatrix) -> tuple[Tensor, Tensor]:
    """The blocks as bytes, and as float16 (MXFP4 has none): scales and minima have even addresses."""
    blocks_OB = weight_OD.blocks_OB
    return blocks_OB, blocks_OB if weight_OD.format.name == "MXFP4" else blocks_OB.view(torch.float16)


def tiling(layout: BlockLayout, dtype: torch.dtype) -> tuple[int, int]:
    """Pieces of an iteration, one by each warp, and iterations whose loads are in flight: as many as registers and shared memory hold."""
    num_pieces = 8 if layout.piece_elems <= 64 else 4
    return num_pieces, 2 if dtype == torch.float32 else 3 if layout.codes.high_bits else 4


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
    LAYOUT: tl.constexpr,
    PIECES: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Compute one tile. x is multiplied with codes, which 16 bits hold exactly, and the sum of a scale's numbers with the scale: fewer
    instructions than to scale each number, and weights are not rounded.
    """
    packed: tl.constexpr = LAYOUT.packed
    run: tl.constexpr = LAYOUT.codes.run
    num_phases: tl.constexpr = LAYOUT.num_phases
    run_elems: tl.constexpr = LAYOUT.run_elems
    num_tiles = tl.cdiv(num_outputs, _OUTPUTS)
    row_R = tl.program_id(0) // num_tiles * _ROWS + tl.arange(0, _ROWS)
    output_O = tl.program_id(0) % num_tiles * _OUTPUTS + tl.arange(0, _OUTPUTS)
    kept_R, kept_O = row_R < num_rows, output_O < num_outputs
    x_1RW = (row_R.to(tl.int64)[:, None] * x_stride + tl.arange(0, LAYOUT.width)[None, :])[None, :, :]
    row_1O1 = (output_O.to(tl.int64) * row_bytes)[None, :, None]
    total_PRO = tl.zeros((PIECES, _ROWS, _OUTPUTS), tl.float32)
    for first in range(0, depth // LAYOUT.piece_elems, PIECES):
        piece_P11 = first + tl.arange(0, PIECES)[:, None, None]
        kept_P11 = piece_P11 < depth // LAYOUT.piece_elems
        kept_PO1, kept_PR1 = kept_P11 & kept_O[None, :, None], kept_P11 & kept_R[None, :, None]
        start_P11, number_P11, low_PO1, fifths_PO1, scales_PO1, high_POW = find_piece(
            blocks, row_1O1, piece_P11, kept_PO1, depth, LAYOUT
        )
        for phase in tl.static_range(num_phases):
            low_POW = load_bytes(blocks, low_PO1 + phase * LAYOUT.phase_bytes, kept_PO1, LAYOUT.width)
            for part in tl.static_range(phase * LAYOUT.phase_elems, phase * LAYOUT.phase_elems + run_elems, run):
                codes_POW = find_codes(low_POW, high_POW, halves, fifths_PO1, number_P11 + part, kept_PO1, part, LAYOUT)
                x_PRW = load_operand(x, x_1RW + start_P11 + part, kept_PR1)
                codes_PWO = tl.permute(_operand(codes_POW, x.dtype.element_ty, LAYOUT).to(x_PRW.dtype), (0, 2, 1))
                if part % packed.scale_elems == 0 or run > packed.scale_elems:
                    sum_PRO = tl.zeros((PIECES, _ROWS, _OUTPUTS), tl.float32)
                    x_sum_PRO = sum_PRO
                sum_PRO = tl.dot(x_PRW, codes_PWO, sum_PRO, input_precision="ieee")
                if packed.has_minimum:
                    ones_PWO = tl.full(codes_PWO.shape, 1, x_PRW.dtype)
                    x_sum_PRO = tl.dot(x_PRW, ones_PWO, x_sum_PRO, input_precision="ieee")
                if (part + run) % packed.scale_elems == 0 or run > packed.scale_elems:
                    scale_PO1, minimum_PO1 = load_scales(
                        blocks, halves, scales_PO1, number_P11 + part, kept_PO1, LAYOUT
                    )
                    total_PRO = tl.fma(sum_PRO, _columns(scale_PO1, total_PRO), total_PRO)
                    if packed.has_minimum:
                        total_PRO = tl.fma(x_sum_PRO, _columns(minimum_PO1, total_PRO), total_PRO)
    total_RO = tl.sum(total_PRO, 0)
    if BIASED:
        total_RO += widened(tl.load(raw(bias) + output_O, mask=kept_O, other=0))[None, :]
    place_RO = row_R.to(tl.int64)[:, None] * num_outputs + output_O[None, :]
    tl.store(raw(out) + place_RO, narrowed(total_RO, out.dtype.element_ty), mask=kept_R[:, None] & kept_O[None, :])


@triton.jit
def _operand(codes, dtype: tl.constexpr, LAYOUT: tl.constexpr):
    """The codes less their offset, exact, in ``dtype`` or float32."""
    CODES: tl.constexpr = LAYOUT.codes
    few_bits: tl.constexpr = CODES.bits < 8 and len(CODES.table) == 0
    if few_bits and dtype == tl.float16:  # the lowest bits of 1024
        return (codes | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + CODES.offset)
    elif few_bits and dtype == tl.bfloat16 and not INTERPRETED:  # of 128
        return (codes | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + CODES.offset)
    else:
        return as_floats(codes, LAYOUT)


@triton.jit
def _columns(numbers_PO1, like_PRO):
    return tl.broadcast_to(tl.permute(numbers_PO1, (0, 2, 1)), like_PRO.shape)


@triton.jit
def _unpack(blocks, halves, out, num_pieces, of_row, depth, row_bytes, LAYOUT: tl.constexpr):
    """Unpack some pieces of rows that follow each other."""
    run: tl.constexpr = LAYOUT.codes.run
    num_phases: tl.constexpr = LAYOUT.num_phases
    run_elems: tl.constexpr = LAYOUT.run_elems
    piece_P1 = (tl.program_id(0) * _UNPACKED + tl.arange(0, _UNPACKED))[:, None]
    kept_P1, row_P1 = piece_P1 < num_pieces, (piece_P1 // of_row).to(tl.int64)
    start_P1, number_P1, low_P1, fifths_P1, scales_P1, high_PW = find_piece(
        blocks, row_P1 * row_bytes, piece_P1 % of_row, kept_P1, depth, LAYOUT
    )
    out_PW = row_P1 * depth + start_P1 + tl.arange(0, LAYOUT.width)[None, :]
    for phase in tl.static_range(num_phases):
        low_PW = load_bytes(blocks, low_P1 + phase * LAYOUT.phase_bytes, kept_P1, LAYOUT.width)
        for part in tl.static_range(phase * LAYOUT.phase_elems, phase * LAYOUT.phase_elems + run_elems, run):
            codes_PW = find_codes(low_PW, high_PW, halves, fifths_P1, number_P1 + part, kept_P1, part, LAYOUT)
            scale_P1, minimum_P1 = load_scales(blocks, halves, scales_P1, number_P1 + part, kept_P1, LAYOUT)
            numbers_PW = as_floats(codes_PW, LAYOUT) * scale_P1
            if LAYOUT.packed.has_minimum:
                numbers_PW += minimum_P1
            tl.store(raw(out) + out_PW + part, narrowed(numbers_PW, out.dtype.element_ty), mask=kept_P1)
