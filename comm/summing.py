"""Adding the ranks' parts, and how far the result can be from the exact sum.

Sums are fp32 in rank order with one rounding at the end. So an element's sum depends on the ranks' values for it and on
nothing else: not on its place, not on the tensor's size, not on which rank adds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SUMMABLE = (torch.float32, torch.bfloat16, torch.float16)

_FP32_UNIT = 2.0**-24


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """((part 0 + part 1) + part 2) + ... in fp32, rounded once to the parts' dtype. Always a new tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    if len(parts) == 2:
        # torch adds 16-bit numbers in fp32 and rounds once: the same bits as below, in one pass.
        return torch.add(parts[0], parts[1])
    total = torch.add(parts[0].float(), parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def rank_order_bound(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise bound on the error of ``sum_in_rank_order``, (elements of one input) float64.

    With u = 2^-24, N parts and S = sum |x_i|: N - 1 fp32 additions err by at most e = ((1 + u)^(N-1) - 1) S. Rounding
    the total t to a type with unit v (2^-8 bf16, 2^-11 fp16) adds at most v (|t| + e). Infinite where S leaves the
    type's range. Source: Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 and 4.
    """
    magnitude, exact = _magnitude(inputs), _exact(inputs)
    error = ((1 + _FP32_UNIT) ** (len(inputs) - 1) - 1) * magnitude
    if inputs[0].dtype != torch.float32:
        error = error + _unit(inputs[0].dtype) * (exact.abs() + error)
    return _infinite_on_overflow(error, magnitude, inputs[0].dtype)


def rounded_hops_bound(inputs: Sequence[Tensor]) -> Tensor:
    """Elementwise bound on the error of a sum whose every partial sum is rounded to the wire's dtype, in any order.

    Each of the N - 1 additions is done in fp32 and rounded to the type: a factor of at most (1 + u)(1 + v), so
    (((1 + u)(1 + v))^(N-1) - 1) S with the symbols of ``rank_order_bound`` (for fp32 the factor is 1 + u alone).
    """
    dtype = inputs[0].dtype
    factor = 1 + _FP32_UNIT
    if dtype != torch.float32:
        factor *= 1 + _unit(dtype)
    magnitude = _magnitude(inputs)
    return _infinite_on_overflow((factor ** (len(inputs) - 1) - 1) * magnitude, magnitude, dtype)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _exact(inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in inputs]).sum(0)


def _magnitude(inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.double().abs() for x in inputs]).sum(0)


def _infinite_on_overflow(error: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(magnitude > torch.finfo(dtype).max, torch.inf, error)
