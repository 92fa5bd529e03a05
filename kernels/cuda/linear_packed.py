"""Packed weights on a GPU: matrix products that read blocks once, and the numbers of blocks.

The products are meant for decode rows, whose products are limited by reading the weights: each program computes a tile of the
result, some numbers of the weights' rows at a time. For prefill rows weights are unpacked in memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch, wait_for_last
from tightwire.kernels.cuda.numbers import INTERPRETED, load_operand, narrowed, raw, widened
from tightwire.kernels.cuda.packed_blocks import BlockLayout, find_codes, find_piece, layout_of, load_bytes, load_scales
from tightwire.kernels.spec.gguf_blocks import Codes
from tightwire.kernels.spec.layer_ops import check_linear
from tightwire.kernels.spec.packed import PackedMatrix

_ROWS = tl.constexpr(16)  # rows of a tile: the minimum of matrix units
_OUTPUTS = tl.constexpr(32)
_FEW_OUTPUTS = 8192  # a row's programs leave a large GPU idle, so each has twice the warps, with more rows too: a row's bits are its own
_SHARED_BYTES = 96 << 10  # that a program takes at most: compute capability 8.6 has 99 KiB
_UNPACKED = tl.constexpr(128)  # pieces of a program that unpacks


def linear_packed(
    x_TD: Tensor, weight_OD: PackedMatrix, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``linear_reference`` in ``out_dtype``, by default x's; weights are not rounded, and the order of the sum differs.

    A row of x with infinities, or so large that its product with a code is one, may give NaN where the reference gives a number.
    """
    check_linear(x_TD, weight_OD, bias_O)
    (num_rows, depth), num_outputs = x_TD.shape, weight_OD.shape[0]
    out_TO = torch.empty(num_rows, num_outputs, dtype=out_dtype or x_TD.dtype, device=x_TD.device)
    num_programs = -(-num_rows // _ROWS.value) * -(-num_outputs // _OUTPUTS.value)
    if num_programs:
        few = num_outputs <= _FEW_OUTPUTS and x_TD.dtype != torch.float32
        layout = layout_of(weight_OD.format, weight_OD.by_plane, few_programs=few)
        sizes = num_rows, num_outputs, depth, x_TD.stride(0), weight_OD.blocks_OB.stride(0)
        given = x_TD, *_views(weight_OD), bias_O, out_TO, *sizes, layout
        launch(_packed_product, num_programs, x_TD.device, *given, **launch_options(layout, x_TD.dtype))
    return out_TO


def unpack_packed(weight_OD: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a matrix, rounded once to ``dtype``: each block is read once, each number written once."""
    numbers_OD = torch.empty(weight_OD.shape, dtype=dtype, device=weight_OD.device)
    layout = layout_of(weight_OD.format, weight_OD.by_plane)
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


def launch_options(layout: BlockLayout, dtype: torch.dtype) -> dict[str, int]:
    """Choose as many iterations with loads in flight as shared memory holds, and registers for two or three programs a processor.

    Products of float32 have no matrix units and need all registers.
    """
    if dtype == torch.float32:
        return {"num_warps": layout.num_pieces, "num_stages": 2}
    high_bits = layout.packed.codes.high_bits > 0
    piece_bytes = _OUTPUTS.value * layout.width * (layout.num_phases + high_bits) + 2 * _ROWS.value * layout.piece_elems
    num_stages = 1 + min(3 - high_bits, _SHARED_BYTES // (layout.num_pieces * piece_bytes))
    most_registers = 96 if layout.packed.codes.fifths_at else 80
    if layout.piece_elems != 32 or not layout.by_plane:
        most_registers = 128
    return {"num_warps": layout.num_pieces, "num_stages": num_stages, "maxnreg": most_registers}


@triton.jit
def _packed_product(
    x, blocks, halves, bias, out, num_rows, num_outputs, depth, x_stride, row_bytes, LAYOUT: tl.constexpr
):
    """Compute one tile. x is multiplied with codes, which 16 bits hold exactly, and the sum of a scale's numbers with the scale: fewer
    instructions than to scale each number, and weights are not rounded.
    """
    wait_for_last()
    packed: tl.constexpr = LAYOUT.packed
    CODES: tl.constexpr = LAYOUT.packed.codes
    run: tl.constexpr = LAYOUT.packed.codes.run
    num_phases: tl.constexpr = LAYOUT.num_phases
    num_pieces: tl.constexpr = LAYOUT.num_pieces
    run_elems: tl.constexpr = LAYOUT.run_elems
    step: tl.constexpr = LAYOUT.scale_step
    row_tiles = tl.cdiv(num_rows, _ROWS)  # those of the same weights follow each other
    row_R = tl.program_id(0) % row_tiles * _ROWS + tl.arange(0, _ROWS)
    output_O = tl.program_id(0) // row_tiles * _OUTPUTS + tl.arange(0, _OUTPUTS)
    kept_R, kept_O = row_R < num_rows, output_O < num_outputs
    x_1RW = (row_R.to(tl.int64)[:, None] * x_stride + tl.arange(0, LAYOUT.width)[None, :])[None, :, :]
    row_1O1 = (output_O.to(tl.int64) * row_bytes)[None, :, None]
    total_PRO = tl.zeros((num_pieces, _ROWS, _OUTPUTS), tl.float32)
    piece_P11, kept_1O1 = tl.arange(0, num_pieces)[:, None, None], kept_O[None, :, None]
    next_scales = _scales(blocks, halves, row_1O1, piece_P11, kept_1O1, depth, LAYOUT)
    for first in range(0, depth // LAYOUT.piece_elems, num_pieces):
        piece_P11 = first + tl.arange(0, num_pieces)[:, None, None]
        kept_P11 = piece_P11 < depth // LAYOUT.piece_elems
        kept_PO1, kept_PR1 = kept_P11 & kept_1O1, kept_P11 & kept_R[None, :, None]
        start_P11, block_number_P11, low_PO1, fifths_PO1, _, high_POW = find_piece(
            blocks, row_1O1, piece_P11, kept_PO1, depth, LAYOUT
        )
        scales = next_scales
        next_scales = _scales(blocks, halves, row_1O1, piece_P11 + num_pieces, kept_1O1, depth, LAYOUT)
        for phase in tl.static_range(num_phases):
            low_POW = load_bytes(blocks, low_PO1 + phase * LAYOUT.phase_bytes, kept_PO1, LAYOUT.width)
            for part in tl.static_range(phase * LAYOUT.phase_elems, phase * LAYOUT.phase_elems + run_elems, run):
                x_PRW = load_operand(x, x_1RW + start_P11 + part, kept_PR1)
                if CODES.are_bits and x.dtype.element_ty != tl.float32 and not INTERPRETED:
                    high_bytes_POW = high_POW if CODES.high_bits > 0 else low_POW
                    codes_POW = _numbers(low_POW, high_bytes_POW, x_PRW, part, CODES)
                else:
                    number_P11 = block_number_P11 + part
                    codes_POW = find_codes(low_POW, high_POW, halves, fifths_PO1, number_P11, kept_PO1, part, LAYOUT)
                    codes_POW = codes_POW.to(x_PRW.dtype)
                codes_PWO = tl.permute(codes_POW, (0, 2, 1))
                if part % packed.scale_elems == 0 or run > packed.scale_elems:
                    sum_PRO = tl.zeros((num_pieces, _ROWS, _OUTPUTS), tl.float32)
                    x_sum_PRO = sum_PRO
                sum_PRO = tl.dot(x_PRW, codes_PWO, sum_PRO, input_precision="ieee")
                if packed.has_minimum:
                    ones_POW = _ones(codes_POW)
                    x_sum_PRO = tl.dot(x_PRW, tl.permute(ones_POW, (0, 2, 1)), x_sum_PRO, input_precision="ieee")
                if (part + run) % packed.scale_elems == 0 or run > packed.scale_elems:
                    total_PRO = tl.fma(sum_PRO, tl.permute(scales[part // step * 2], (0, 2, 1)), total_PRO)
                    if packed.has_minimum:
                        total_PRO = tl.fma(x_sum_PRO, tl.permute(scales[part // step * 2 + 1], (0, 2, 1)), total_PRO)
    total_RO = tl.sum(total_PRO, 0)
    if bias is not None:
        total_RO += widened(tl.load(raw(bias) + output_O, mask=kept_O, other=0))[None, :]
    place_RO = row_R.to(tl.int64)[:, None] * num_outputs + output_O[None, :]
    tl.store(raw(out) + place_RO, narrowed(total_RO, out.dtype.element_ty), mask=kept_R[:, None] & kept_O[None, :])


@triton.jit
def _scales(blocks, halves, row_1O1, piece_P11, kept_1O1, depth, LAYOUT: tl.constexpr):
    """Scale and minimum of each part of a piece, loaded an iteration before they are used: a few bytes that nothing else waits for."""
    kept_PO1 = kept_1O1 & (piece_P11 < depth // LAYOUT.piece_elems)
    _, number_P11, _, _, scales_PO1, _ = find_piece(blocks, row_1O1, piece_P11, kept_PO1, depth, LAYOUT)
    unit: tl.constexpr = LAYOUT.unit
    step: tl.constexpr = LAYOUT.scale_step
    found = ()
    for part in tl.static_range(0, unit, step):
        found = found + load_scales(blocks, halves, scales_PO1, number_P11 + part, kept_PO1, LAYOUT)
    return found


@triton.jit
def _ones(like):
    """Ones that seem to depend on ``like``, or Triton would not load it ahead of its use."""
    if like.dtype == tl.float32:
        return tl.full(like.shape, 1, like.dtype)
    else:
        one: tl.constexpr = "0x3C003C00;" if like.dtype == tl.float16 else "0x3F803F80;"
        ptx: tl.constexpr = "mov.b32 $0, " + one
        return tl.inline_asm_elementwise(ptx, "=r,r", [like], dtype=like.dtype, is_pure=True, pack=2)  # pyright: ignore[reportArgumentType]


@triton.constexpr_function
def _numbers_ptx(in_unit: int, codes: Codes, is_half: bool) -> str:
    """Return PTX that makes numbers of four bytes with low bits and four with high bits: a code is the lowest bits of 128 (float16:
    1024), from which these and the offset are subtracted, two at a time and exactly.
    """
    base, one, less, kind = (0x6400, 0x3C00, 0xE400, "f16x2") if is_half else (0x4300, 0x3F80, 0xC300, "bf16x2")
    base, one, less = (0x10001 * each for each in (base, one, less + codes.offset))
    lines = [f".reg .b32 codes, high, pair, one, less; mov.b32 one, {one}; mov.b32 less, {less};"]
    lines.append(f"shr.b32 codes, $2, {in_unit // codes.run * codes.bits % 8};")
    mask = 0x10001 * ((1 << codes.bits + codes.high_bits) - 1)
    if codes.high_bits:
        low_mask, high_mask = (0x01010101 * ((1 << bits) - 1) for bits in (codes.bits, codes.high_bits))
        shift = in_unit // codes.high_run * codes.high_bits
        lines.append(f"and.b32 codes, codes, {low_mask}; shr.b32 high, $3, {shift}; and.b32 high, high, {high_mask};")
        lines.append(f"shl.b32 high, high, {codes.bits}; or.b32 codes, codes, high;")
    for number, two_bytes in enumerate((0x4140, 0x4342)):
        lines.append(f"prmt.b32 pair, codes, 0, {two_bytes}; lop3.b32 pair, pair, {mask}, {base}, 0xEA;")
        lines.append(f"fma.rn.{kind} ${number}, pair, one, less;")
    return f"{{ {' '.join(lines)} }}"


@triton.jit
def _numbers(low, high, x, IN_UNIT: tl.constexpr, CODES: tl.constexpr):
    """``find_codes`` of x's type, with fewer instructions than Triton finds."""
    ptx: tl.constexpr = _numbers_ptx(IN_UNIT, CODES, x.dtype == tl.float16)
    args = [low, high]
    return tl.inline_asm_elementwise(ptx, "=r,=r,r,r", args, x.dtype, is_pure=True, pack=4)  # pyright: ignore[reportArgumentType]


@triton.jit
def _unpack(blocks, halves, out, num_pieces, of_row, depth, row_bytes, LAYOUT: tl.constexpr):
    """Unpack some pieces of rows that follow each other."""
    wait_for_last()
    run: tl.constexpr = LAYOUT.packed.codes.run
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
            numbers_PW = codes_PW * scale_P1
            if LAYOUT.packed.has_minimum:
                numbers_PW += minimum_P1
            tl.store(raw(out) + out_PW + part, narrowed(numbers_PW, out.dtype.element_ty), mask=kept_P1)
