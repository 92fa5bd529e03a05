"""Slices of a tensor, one for each rank, and the sum of the ranks' parts. ``codec.error_bounds`` bounds its error.

Sums are fp32 in rank order with one rounding at the end. So an element's sum depends only on the ranks' values for it, not on
its place, the tensor's size, or the rank that adds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SUMMABLE = (torch.float32, torch.bfloat16, torch.float16)


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


def slice_lengths(num_elems: int, num_slices: int, multiple: int = 1) -> list[int]:
    """Lengths of consecutive slices of ceil(n / slices) elements, rounded up to a ``multiple``; the last may be short.

    Slices begin at multiples of ``multiple``, so a codec's groups are never split. The last slices may be empty.
    """
    length = -(-num_elems // num_slices)
    length = -(-length // multiple) * multiple
    return [max(0, min(length, num_elems - i * length)) for i in range(num_slices)]


def as_bytes(x_N: Tensor) -> Tensor:
    """The memory of a contiguous one-dimensional tensor as uint8, without a copy."""
    return x_N.view(torch.uint8)
