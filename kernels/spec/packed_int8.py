"""Reference of the product of packed weights with activations in 8 bits, and of interleaved rows.

Activations are rounded to integers in groups of 32, those of the weights' blocks: scale = max |x| / 127 in float32, and
code = x * (127 / max |x|), rounded to nearest even. A group's products of codes are added exactly, and

    sum <- fma(dot of the codes, weight scale * activation scale, sum)
    sum <- fma(weight minimum, activation scale * sum of the activation codes, sum)     if the weights have a minimum

group after group, in float32. A bias is added at the end, and the result rounded once.

A group whose largest magnitude is at most 1e-30 counts as zero; one with an infinite number or a NaN has scale NaN.

Source: quantize_row_q8_1 and ggml_vec_dot_q4_1_q8_1 of llama.cpp, which add in another order.
"""

import torch
from torch import Tensor

from tightwire.kernels.spec.packed import PackedMatrix, block_parts
from tightwire.kernels.spec.packed_format import GROUP_ELEMS, INTERLEAVED_ROWS

_TINY = 1e-30


def quantize_activations(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (T, G, 32) and scales (T, G), all float32."""
    x_TGN = x_TD.float().unflatten(1, (-1, GROUP_ELEMS))
    most_TG1 = x_TGN.abs().amax(-1, keepdim=True)
    finite_TG1 = x_TGN.isfinite().all(-1, keepdim=True)
    used_TG1 = finite_TG1 & (most_TG1 > _TINY)
    codes_TGN = torch.where(used_TG1, (x_TGN * (torch.full_like(most_TG1, 127.0) / most_TG1)).round(), 0.0)
    scale_TG1 = torch.where(used_TG1, most_TG1 / 127.0, 0.0).masked_fill_(~finite_TG1, torch.nan)
    return codes_TGN, scale_TG1.squeeze(-1)


def linear_int8_reference(
    x_TD: Tensor, weight: PackedMatrix, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ weight.T + bias`` with activations in 8 bits, in the dtype of x or ``out_dtype``."""
    codes_TGN, scale_TG = quantize_activations(x_TD)
    term_TG = scale_TG * codes_TGN.sum(-1)
    weight_codes_OGN, weight_scale_OG1, minimum_OG1 = block_parts(weight)
    sum_TO = torch.zeros(len(x_TD), weight.shape[0])
    for group in range(codes_TGN.shape[1]):
        dot_TO = codes_TGN[:, group] @ weight_codes_OGN[:, group].T  # integers below 2^24 are exact in float32
        scale_TO = scale_TG[:, group, None] * weight_scale_OG1[:, group, 0]
        sum_TO = _fma(dot_TO, scale_TO, sum_TO)
        if minimum_OG1 is not None:
            sum_TO = _fma(minimum_OG1[:, group, 0], term_TG[:, group, None], sum_TO)
    if bias_O is not None:
        sum_TO = sum_TO + bias_O.float()
    return sum_TO.to(out_dtype or x_TD.dtype)


def interleave_reference(weight: PackedMatrix) -> PackedMatrix:
    """A copy with each full 16 rows as one tile a group: scales, minima, then words of codes. Other rows stay."""
    packed, blocks = weight.format, weight.blocks_OB
    whole = len(blocks) // INTERLEAVED_ROWS * INTERLEAVED_ROWS
    # (panels, rows, groups, block bytes) to (panels, groups, pieces, rows, piece bytes)
    blocks_PRGB = blocks[:whole].unflatten(1, (-1, packed.block_bytes)).unflatten(0, (-1, INTERLEAVED_ROWS))
    header_PRGB, codes_PRGB = blocks_PRGB.tensor_split([packed.header_bytes], -1)
    parts = [
        part_PRGB.unflatten(-1, (-1, piece_bytes)).permute(0, 2, 3, 1, 4).flatten(2)
        for part_PRGB, piece_bytes in ((header_PRGB, 2), (codes_PRGB, 4))
    ]
    tiles = torch.cat(parts, -1).reshape(whole, blocks.shape[1])
    return PackedMatrix(torch.cat([tiles, blocks[whole:]]), packed, interleaved=True)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once. The float64 sum is rounded to odd, so the second rounding is correct."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    inexact = total.isfinite() & (error != 0) & (total.view(torch.int64) % 2 == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, (total.view(torch.int64) + step).view(torch.float64), total).float()
