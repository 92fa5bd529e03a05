"""Formats of other projects, in torch, to compare our codecs with: AMD's INT6 and INT4, and quantization by rows.

No server sends them, so they have no bytes: a function gives the numbers that a receiver would have. AMD's formats are those
of QuickReduce in FlyDSL (ROCm/aiter, quick_allreduce_codec). Here the arithmetic is float32, and there float16, so that a
number between two levels may get the other one.
"""

import torch
from torch import Tensor

_GROUP_ELEMS = 16
_EXPONENT_BIAS = 7
_INVERSE_OFFSET = 1e-7  # added before division, so that a group of zeros has an inverse
AMD_SCALE_BITS = 8 / _GROUP_ELEMS  # for each number


def amd(x: Tensor, bits: int) -> Tensor:
    """The numbers of groups of 16 after AMD's quantization with ``bits`` and a signed scale of 8 bits, float32.

    A scale is the number s of the largest size in its group, as a float with 4 exponent and 3 mantissa bits: sizes are
    2^-7 to 480 without subnormal numbers, rounded to nearest, and larger ones saturate. With L = 2^(bits - 1), a number
    has level x / (-s / L), rounded to even and clamped to -L .. L - 1.
    """
    groups_GE, levels = x.float().reshape(-1, _GROUP_ELEMS), 2 ** (bits - 1)
    step_G1 = _scales(_extremum(groups_GE)).unsqueeze(1) * (-1.0 / levels)
    levels_GE = (groups_GE * (1.0 / (step_G1 + _INVERSE_OFFSET))).clamp(-levels, levels - 1).round()
    return (levels_GE * step_G1).view(x.shape)


def _extremum(groups_GE: Tensor) -> Tensor:
    """(G,): the number of the largest size. Of equal sizes: the negative one of even or odd places, the odd place of both."""
    pairs_GQH = groups_GE.view(-1, _GROUP_ELEMS // 2, 2)
    high_GH, low_GH = pairs_GQH.amax(1), pairs_GQH.amin(1)
    even_G, odd_G = torch.where(high_GH.abs() > low_GH.abs(), high_GH, low_GH).unbind(1)
    return torch.where(even_G.abs() > odd_G.abs(), even_G, odd_G)


def _scales(x_G: Tensor) -> Tensor:
    """(G,) float32: ``x_G`` with 4 bits of exponent and 3 of mantissa. Code 0 is zero; so a positive number there gets code 1."""
    # Half of the last place is added to the bits of float32; a carry increases the exponent.
    least_code = (127 - _EXPONENT_BIAS) << 3
    codes_G = ((x_G.abs().view(torch.int32) + (1 << 19)) >> 20) - least_code
    codes_G = torch.where(codes_G < 0, codes_G & 7, codes_G.clamp(max=127))
    codes_G = codes_G.where((codes_G != 0) | (x_G < 0), 1)
    sizes_G = ((codes_G + least_code) << 20).view(torch.float32)
    return torch.where(x_G == 0, 0.0, sizes_G.copysign(x_G))


def uniform(x_RE: Tensor, bits: int) -> Tensor:
    """The numbers of each row after uniform quantization, float32: levels -L to L with L = 2^(bits - 1) - 1.

    A row has one scale, max|x| / L, rounded up to bfloat16. So it takes ``bits`` a number and 16 a row.
    """
    x_RE, top = x_RE.float(), 2 ** (bits - 1) - 1
    scale_R1 = (x_RE.abs().amax(1, keepdim=True) / top).clamp(min=2.0**-126)
    scale_R1 = (((scale_R1.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)
    return (x_RE / scale_R1).round().clamp(-top, top) * scale_R1


def affine(x_RE: Tensor, bits: int) -> Tensor:
    """The numbers of each row after asymmetric quantization, float32: 2^bits levels from the row's minimum to its maximum.

    A row has a step and a minimum in bfloat16. So it takes ``bits`` a number and 32 a row.
    """
    low_R1, high_R1 = (end.unsqueeze(1).bfloat16().float() for end in x_RE.float().aminmax(dim=1))
    step_R1 = ((high_R1 - low_R1) / (2**bits - 1)).clamp(min=2.0**-126).bfloat16().float()
    return ((x_RE.float() - low_R1) / step_R1).round().clamp(0, 2**bits - 1) * step_R1 + low_R1
