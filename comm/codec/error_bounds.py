"""Errors of a sum over ranks: elementwise bounds, derived from the steps of the algorithm, and a typical relative error.

Each bound is float64 with the shape of one input, and infinite if the sum may exceed the dtype's range. u is 2^-24,
half of float32's eps; v is half of the dtype's eps (2^-8 bfloat16, 2^-11 float16).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec, sum_encoded

_FP32_UNIT = 2.0**-24


def rank_order_bound(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise bound on the error of ``sum_in_rank_order``.

    With N parts and S = sum |x_i|: N - 1 fp32 additions have an error of at most e = ((1 + u)^(N-1) - 1) S. Rounding
    the total t to a 16-bit type adds at most v (|t| + e). Source: Higham, Accuracy and Stability of Numerical
    Algorithms, ch. 2, 4.
    """
    return _rounded(inputs, adding_bound(inputs))


def adding_bound(inputs: Sequence[Tensor]) -> Tensor:
    """Bound on the error of the float32 sum of ``inputs`` in any order, before rounding: e of ``rank_order_bound``."""
    return _adding_factor(len(inputs)) * _magnitude(inputs)


def rounded_parts_bound(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Bound for sums in rank order of each of ``parts``, rounded to the inputs' dtype, then added and rounded again.

    With e_k the bound of part k: E = sum e_k + (K - 1 additions of numbers up to S + sum e_k), then v (|t| + E).
    """
    inputs = [x for part in parts for x in part]
    error = torch.stack([rank_order_bound(part) for part in parts]).sum(0)
    return _rounded(inputs, error + _adding_factor(len(parts)) * (_magnitude(inputs) + error))


def rounded_hops_bound(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise bound on the error of a sum whose partial sums are all rounded to the dtype, in any order.

    Each of the N - 1 additions has a factor of at most (1 + u)(1 + v): (((1 + u)(1 + v))^(N-1) - 1) S; fp32 has 1 + u
    alone.
    """
    dtype = inputs[0].dtype
    factor = 1 + _FP32_UNIT
    if dtype != torch.float32:
        factor *= 1 + _unit(dtype)
    magnitude = _magnitude(inputs)
    error = (factor ** (len(inputs) - 1) - 1) * magnitude
    return _infinite_on_overflow(error, magnitude + error, dtype)


def quantized_sum_bound(inputs: Sequence[Tensor], codec: Codec) -> tuple[Tensor, Tensor]:
    """The float32 sum of the (N,) ``inputs``, each encoded and decoded by ``codec``, and a float64 bound on its error.

    With b_i the codec's own bound for input i: sum b_i, and float32 additions of numbers up to |x_i| + b_i: W - 1, or 3 W for
    a sum that is encoded again. That begins with zeros and ``sum_offset`` scales, of at most 2 b_i each, which adds up to
    1600 b_i to the numbers: 511 scales for the offset and the codes, 255 between x_i and the zero. Rotated formats may add
    rotated numbers, each of which is at most the sum of its group's magnitudes.
    """
    sum_N = sum_encoded([codec.encode(x_N) for x_N in inputs], inputs[0].numel(), codec, inputs[0].dtype)
    magnitude_N = _magnitude(inputs)
    error_N = torch.zeros_like(magnitude_N)
    if not codec.exact:
        error_N = torch.stack([codec.max_error(x_N) for x_N in inputs]).sum(0)
        magnitude_N = magnitude_N + error_N
        if codec.rotated_elems > 1:
            magnitude_N = _group_sums(magnitude_N, codec.rotated_elems)
    num_added = len(inputs) if codec.exact else 3 * len(inputs) + 1
    largest_N = magnitude_N + 1600 * error_N
    return sum_N, _infinite_on_overflow(error_N + _adding_factor(num_added) * largest_N, largest_N, torch.float32)


def quantized_total_bound(inputs: Sequence[Tensor], sum_N: Tensor, error_N: Tensor, codec: Codec) -> Tensor:
    """Float64 bound on the error of a sum that is encoded by ``codec``, decoded, and rounded to the inputs' dtype.

    ``sum_N`` is clamped to ``error_N`` around the exact sum t, because a wrong sum must not widen its own bound.
    Rounding adds v (|t| + e) or half the smallest number.
    """
    if not codec.exact:
        exact_N = _exact(inputs)
        reached_N = torch.clamp(sum_N.double(), exact_N - error_N, exact_N + error_N)
        codec_error_N = codec.max_error(reached_N.where(error_N < torch.inf, torch.inf).float())
        # The encoded sum has other last bits, which may move the group's bfloat16 scale to a neighboring value.
        error_N = error_N + codec_error_N * (1 + 2.0**-7)
    numbers = torch.finfo(inputs[0].dtype)
    return _rounded(inputs, error_N, numbers.smallest_normal * numbers.eps / 2)


def _rounded(inputs: Sequence[Tensor], error: Tensor, least: float = 0.0) -> Tensor:
    """The bound of a sum with ``error``, rounded to the inputs' dtype if that is not float32, at best to ``least``."""
    dtype = inputs[0].dtype
    largest = _magnitude(inputs) + error
    if dtype != torch.float32:
        error = error + _unit(dtype) * (_exact(inputs).abs() + error) + least
    return _infinite_on_overflow(error, largest, dtype)


def _group_sums(x_N: Tensor, group_elems: int) -> Tensor:
    """For each element, the sum over its group of ``group_elems``; the last group is padded as the codec pads it."""
    filling = x_N[-1:].expand(-x_N.numel() % group_elems)
    padded = torch.cat([x_N, filling]).view(-1, group_elems)
    return padded.sum(1, keepdim=True).expand_as(padded).reshape(-1)[: x_N.numel()]


def _adding_factor(num_parts: int) -> float:
    return (1 + _FP32_UNIT) ** (num_parts - 1) - 1


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _exact(inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in inputs]).sum(0)


def _magnitude(inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.double().abs() for x in inputs]).sum(0)


def _infinite_on_overflow(error: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``error``, or infinity where ``largest``, a bound on the rounded partial sums, exceeds the dtype."""
    # Written so that NaN, the sum of opposite infinities, exceeds any bound too.
    return torch.where(largest <= torch.finfo(dtype).max, error, torch.inf)


_ROWS, _ROW_ELEMS, _SEED = 8, 4096, 7
_OUTLIER_SHARE, _OUTLIER_SCALE = 0.008, 20.0
_MAX_RANKS = 8  # more ranks do not change a relative error


def relative_rms_error(reduce_codec: Codec, gather_codec: Codec, num_ranks: int) -> float:
    """RMS of (result - exact sum) over RMS of the exact sum, for a two-shot sum with these codecs on its two legs.

    The numbers are Gaussian, with 0.8 % of the channels about 20 times as large, the same on every rank: such outliers
    are hard for a group's shared scale. Rounding to the dtype is not counted. Cost: a few milliseconds, on the CPU.
    """
    if reduce_codec.exact and gather_codec.exact:
        return 0.0
    generator = torch.Generator().manual_seed(_SEED)
    channel_scales = torch.ones(_ROW_ELEMS)
    outliers = torch.randperm(_ROW_ELEMS, generator=generator)[: round(_OUTLIER_SHARE * _ROW_ELEMS)]
    channel_scales[outliers] = _OUTLIER_SCALE * torch.exp(0.5 * torch.randn(len(outliers), generator=generator))
    exact, received = torch.zeros(_ROWS * _ROW_ELEMS), torch.zeros(_ROWS * _ROW_ELEMS)
    for _ in range(min(num_ranks, _MAX_RANKS)):
        part = (torch.randn(_ROWS, _ROW_ELEMS, generator=generator) * channel_scales).view(-1)
        exact += part
        received += _through(reduce_codec, part)
    error = _through(gather_codec, received) - exact
    return float(error.square().mean().sqrt() / exact.square().mean().sqrt())


def _through(codec: Codec, x_N: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x_N), x_N.numel(), x_N.dtype)
