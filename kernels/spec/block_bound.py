"""Error bounds of block quantization, from the specification and the numbers alone."""

import torch
from torch import Tensor

from tightwire.kernels.spec.block_format import FLOAT8_MAX, MIN_SCALE, BlockFormat
from tightwire.kernels.spec.block_quant import rotated, to_groups

_UNIT = 2.0**-24  # float32 rounds to nearest by at most this share
_STEP_BF16 = 2.0**-7  # bfloat16 rounds up or down by less than this share, by half of it to nearest,
_TINY_BF16 = 2.0**-133  # or by this much where it has no more bits
_MAX = torch.finfo(torch.float32).max


def max_error(x_N: Tensor, fmt: BlockFormat) -> Tensor:
    """(N,) float64: bounds on |decode(encode(x)) - x|, the decoded number as float32; infinite where it may be NaN.

    With u = 2^-24, a group's smallest and largest number l and h, and T the highest code (symmetric: the number of levels):

        scale    The zero z lies below l by at most z' = 2^-7 |l| + 2^-133; the scale is at most
                 s = (1 + 2^-7) (1 + 4u) max((h - l + z') / T, 2^-126). Symmetric: max|x| in place of h - l + z'.
        code     (x - z) / scale is computed with three roundings of u (the inverse of a scale above 2^126 is subnormal:
                 4u) and then rounded to an integer: s/2 + 6u |x - z|. Adding z to decode rounds once more.
                 So |y - x| <= s/2 + 8u (T s + |x|).
        float8   e4m3 keeps four bits: s/2 becomes 2^-4 |x| + 2^-10 s, T is 448.
        symmetric  The highest level is T - 1, so a number of up to T scales comes back as that: |x| - (T - 1) s'. Here s' is
                 the least scale, max|x| / T (1 - 4u).
        rotated  The numbers above are r = H x, computed in k = log2(g) rounds of additions: off by e = 1.01 k u sum|x|.
                 A number decoded is the mean of g rotated ones with signs, so it errs by no more than the largest of
                 them, s/2 + 8u (T s + |r|) + e, and by k more roundings of it.

    A group gets one bound but for |x|. Cost: some ten passes in float64; for tests and self-tests.
    """
    groups_GE = to_groups(x_N, fmt).double()
    bound_GE = _rotated_bound(groups_GE, fmt) if fmt.hadamard else _bound(groups_GE, fmt, 0.0)
    # There is no bound where a number is infinite or becomes NaN.
    return bound_GE.nan_to_num(nan=torch.inf, posinf=torch.inf).view(-1)[: x_N.numel()]


def _bound(groups_GE: Tensor, fmt: BlockFormat, slack_G1: Tensor | float) -> Tensor:
    """Bounds for numbers that are known only to within ``slack_G1``, which is not part of the result."""
    low_G1, high_G1 = groups_GE.amin(1, keepdim=True) - slack_G1, groups_GE.amax(1, keepdim=True) + slack_G1
    size_G1 = torch.maximum(low_G1.abs(), high_G1.abs())
    if fmt.has_zeros:
        top, offset_G1 = fmt.max_code, low_G1.abs() * (1 + _STEP_BF16) + _TINY_BF16
        span_G1 = high_G1 - low_G1 + low_G1.abs() * _STEP_BF16 + _TINY_BF16
    else:
        top, offset_G1 = FLOAT8_MAX if fmt.float8 else fmt.num_levels, torch.zeros_like(low_G1)
        span_G1 = size_G1
    scale_G1 = (1 + _STEP_BF16) * (1 + 4 * _UNIT) * (span_G1 / top).clamp(min=MIN_SCALE)
    scale_G1 = scale_G1.where(top * scale_G1 + offset_G1 < _MAX, torch.inf)
    rounding_GE = 2.0**-4 * groups_GE.abs() + 2.0**-10 * scale_G1 if fmt.float8 else scale_G1 / 2
    if fmt.symmetric:
        least_G1 = (span_G1 - 2 * slack_G1) / top * (1 - 4 * _UNIT)
        clipped_GE = groups_GE.abs() + slack_G1 - (top - 1) * least_G1
        # Only on the side opposite to the largest size; on both if the slack leaves that side open.
        side_G1 = torch.where((low_G1 + high_G1).abs() > 4 * slack_G1, (low_G1 + high_G1).sign(), 0.0)
        rounding_GE = torch.where(groups_GE * side_G1 <= 0, torch.maximum(rounding_GE, clipped_GE), rounding_GE)
    return rounding_GE + 8 * _UNIT * (top * scale_G1 + groups_GE.abs())


def _rotated_bound(groups_GE: Tensor, fmt: BlockFormat) -> Tensor:
    size = fmt.group_elems
    rounds = size.bit_length() - 1
    slack_G1 = 1.01 * rounds * _UNIT * groups_GE.abs().sum(1, keepdim=True)
    rotated_GE = rotated(groups_GE, fmt)
    error_G1 = _bound(rotated_GE, fmt, slack_G1).amax(1, keepdim=True) + slack_G1
    largest_G1 = rotated_GE.abs().amax(1, keepdim=True) + error_G1
    error_G1 = error_G1 + 1.01 * rounds * _UNIT * largest_G1 + 2.0**-149
    return error_G1.where(size * largest_G1 < _MAX, torch.inf).expand_as(groups_GE)
