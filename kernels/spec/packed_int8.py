"""Reference of the product of packed weights with activations in 8 bits.

Activations are rounded to integers in groups of 32: scale = max |x| / 127 in float32, and code = x * (127 / max |x|), rounded
to nearest even. The products of codes whose weights share a scale (32 or 16 of them) are added exactly, and

    sum <- fma(dot of the codes, weight scale * activation scale, sum)
    sum <- fma(weight minimum, activation scale * sum of the activation codes, sum)     if the weights have minima

one scale after the other, in float32. A bias is added at the end, and the result rounded once.

A group whose largest magnitude is at most 1e-30 counts as zero; one with an infinite number or a NaN has scale NaN.

Source: quantize_row_q8_1 and ggml_vec_dot_q4_1_q8_1 of llama.cpp, which add in another order.
"""

import torch
from torch import Tensor

from tightwire.kernels.spec.gguf_blocks import GROUP_ELEMS
from tightwire.kernels.spec.packed import PackedMatrix, block_parts

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
    weight_codes_OSN, weight_scale_OS1, minimum_OS1 = block_parts(weight)
    part_elems = weight.format.scale_elems
    codes_TSN = codes_TGN.flatten(1).unflatten(1, (-1, part_elems))
    scale_TS = scale_TG.repeat_interleave(GROUP_ELEMS // part_elems, 1)
    term_TS = scale_TS * codes_TSN.sum(-1)
    sum_TO = torch.zeros(len(x_TD), weight.shape[0])
    for part in range(codes_TSN.shape[1]):
        dot_TO = codes_TSN[:, part] @ weight_codes_OSN[:, part].T  # integers below 2^24 are exact in float32
        scale_TO = scale_TS[:, part, None] * weight_scale_OS1[:, part, 0]
        sum_TO = _fma(dot_TO, scale_TO, sum_TO)
        if minimum_OS1 is not None:
            sum_TO = _fma(minimum_OS1[:, part, 0], term_TS[:, part, None], sum_TO)
    if bias_O is not None:
        sum_TO = sum_TO + bias_O.float()
    return sum_TO.to(out_dtype or x_TD.dtype)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in float32, rounded once. The float64 sum is rounded to odd, so the second rounding is correct."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    inexact = total.isfinite() & (error != 0) & (total.view(torch.int64) % 2 == 0)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, (total.view(torch.int64) + step).view(torch.float64), total).float()
