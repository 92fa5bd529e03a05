"""One-shot AllReduce: every rank sends its whole tensor to all others and sums all tensors. For small messages."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.entry import Setting, Work
from tightwire.comm.all_reduce.names import NAMES
from tightwire.comm.codec.codec import Carried, sum_in_rank_order
from tightwire.comm.codec.error_bounds import rank_order_bound
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import KernelSums


class OneShotAllReduce(BaseAllReduce):
    """gather(x), then sum in rank order.

    Cost: (N-1) * M bytes sent, one round. Exactness: fp32 in rank order, one rounding, the same computation on every
    rank; an element's sum does not depend on its place or on the tensor's size.
    """

    name = "one-shot"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.in_kernel: KernelSums | None = None
        fused = group.transport.fused
        if fused is not None:
            self._fused = lambda x, carried: fused.one_shot(x)
            self.in_kernel = fused.in_kernel

    def _reduce(self, x_N: Tensor, carried: Carried) -> Tensor:
        return sum_in_rank_order([buf.view(x_N.dtype) for buf in self._transport.gather(x_N.view(torch.uint8))])

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return (self.world_size - 1) * num_elems * elem_bytes

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        return rank_order_bound(inputs)


def _work(setting: Setting, num_bytes: int) -> Work:
    ranks = setting.world_size
    return Work(1, (ranks - 1) * num_bytes, ranks * num_bytes / setting.elem_bytes)


ENTRY = replace(NAMES["one-shot"], make=OneShotAllReduce, work=_work, preference=1)
