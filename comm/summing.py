"""Adding the ranks' parts. How far the result can be from the exact sum is in ``comm.error_bounds``.

Sums are fp32 in rank order with one rounding at the end. So an element's sum depends on the ranks' values for it and on
nothing else: not on its place, not on the tensor's size, not on which rank adds.
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
