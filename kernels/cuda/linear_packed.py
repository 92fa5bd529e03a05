"""Matrix products with packed weights on a GPU: blocks are read once, and unpacked and multiplied in registers.

They are meant for decode rows, whose products are limited by reading the weights. Each program computes a tile of the
result, one block of the weights' rows at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.numbers import INTERPRETED, narrowed, raw, widened
from tightwire.kernels.spec.packed import PackedMatrix

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = tl.constexpr(16)  # rows of a tile: the minimum of matrix units
_OUTPUTS = tl.constexpr(32)
_HALF = tl.constexpr(16)  # numbers of a group that share bytes with the other sixteen, and the depth of one product


def linear_packed(
    x_TD: Tensor, weight_OD: PackedMatrix, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute ``linear.linear_reference`` in ``out_dtype``, by default x's; only the order of the float32 sum differs."""
    _check(x_TD, weight_OD, bias_O)
    (num_rows, depth), num_outputs = x_TD.shape, weight_OD.shape[0]
    out_TO = torch.empty(num_rows, num_outputs, dtype=out_dtype or x_TD.dtype, device=x_TD.device)
    num_programs = -(-num_rows // _ROWS.value) * -(-num_outputs // _OUTPUTS.value)
    if num_programs:
        blocks = weight_OD.blocks_OB
        given = x_TD, blocks, blocks.view(torch.float16), x_TD if bias_O is None else bias_O, out_TO
        sizes = num_rows, num_outputs, depth, x_TD.stride(0), blocks.stride(0)
        launch(_packed_product, num_programs, x_TD.device, *given, *sizes, weight_OD.format, bias_O is not None)
    return out_TO


def _check(x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> None:
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]) or x.stride(1) != 1:
        raise ValueError(
            "linear needs x (T, D) with contiguous rows, weight (O, D) and bias (O,) or None; "
            f"got {tuple(x.shape)}, {weight.shape} and {None if bias is None else tuple(bias.shape)}"
        )
    if x.dtype not in _NUMBERS or (bias is not None and (bias.dtype != x.dtype or bias.stride(0) != 1)):
        raise ValueError(
            f"linear needs x and bias in one of {', '.join(map(str, _NUMBERS))}; "
            f"got {x.dtype} and {None if bias is None else bias.dtype}"
        )


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
    BIASED: tl.constexpr,
):
    """Compute one tile. ``halves`` is a float16 view of ``blocks``; scales and minima have even addresses."""
    num_tiles = tl.cdiv(num_outputs, _OUTPUTS)
    row_R = tl.program_id(0) // num_tiles * _ROWS + tl.arange(0, _ROWS)
    output_O = tl.program_id(0) % num_tiles * _OUTPUTS + tl.arange(0, _OUTPUTS)
    kept_R1, kept_O1 = (row_R < num_rows)[:, None], (output_O < num_outputs)[:, None]
    place_1H = tl.arange(0, _HALF)[None, :]
    x_RH = raw(x) + row_R.to(tl.int64)[:, None] * x_stride + place_1H
    block_O1 = output_O.to(tl.int64)[:, None] * row_bytes
    dtype: tl.constexpr = x.dtype.element_ty
    total_RO = tl.zeros((_ROWS, _OUTPUTS), tl.float32)
    for _ in range(0, depth, 2 * _HALF):
        codes_OH = blocks + block_O1 + PACKED.header_bytes + place_1H
        bytes_OH = tl.load(codes_OH, mask=kept_O1, other=0)
        if PACKED.bits == 8:
            low_OH = bytes_OH.to(tl.int8, bitcast=True).to(tl.float32)
            high_OH = tl.load(codes_OH + _HALF, mask=kept_O1, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        else:
            offset: tl.constexpr = 0 if PACKED.has_minimum else 8
            low_OH = ((bytes_OH & 15).to(tl.int32) - offset).to(tl.float32)
            high_OH = ((bytes_OH >> 4).to(tl.int32) - offset).to(tl.float32)
        scale_O1 = tl.load(halves + block_O1 // 2, mask=kept_O1, other=0).to(tl.float32)
        low_OH *= scale_O1
        high_OH *= scale_O1
        if PACKED.has_minimum:
            minimum_O1 = tl.load(halves + block_O1 // 2 + 1, mask=kept_O1, other=0).to(tl.float32)
            low_OH += minimum_O1
            high_OH += minimum_O1
        total_RO = _add_product(tl.load(x_RH, mask=kept_R1, other=0), low_OH, total_RO, dtype)
        total_RO = _add_product(tl.load(x_RH + _HALF, mask=kept_R1, other=0), high_OH, total_RO, dtype)
        x_RH += 2 * _HALF
        block_O1 += PACKED.block_bytes
    if BIASED:
        total_RO += widened(tl.load(raw(bias) + output_O, mask=output_O < num_outputs, other=0))[None, :]
    place_RO = row_R.to(tl.int64)[:, None] * num_outputs + output_O[None, :]
    tl.store(
        raw(out) + place_RO, narrowed(total_RO, out.dtype.element_ty), mask=kept_R1 & (output_O < num_outputs)[None, :]
    )


@triton.jit
def _add_product(x_RH, weight_OH, total_RO, dtype: tl.constexpr):
    """Return total + x @ weight^T, with x as loaded through ``raw``, and float32 weights rounded to ``dtype``."""
    if dtype == tl.bfloat16:
        if INTERPRETED:  # it multiplies the 16 bits as integers
            x_RH = widened(x_RH)
            weight_OH = widened(narrowed(weight_OH, dtype))
        else:
            x_RH = x_RH.to(tl.bfloat16, bitcast=True)
            weight_OH = weight_OH.to(tl.bfloat16)
    else:
        weight_OH = weight_OH.to(dtype)
    return tl.dot(x_RH, tl.trans(weight_OH), total_RO, input_precision="ieee")
