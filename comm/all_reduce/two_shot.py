"""Two-shot AllReduce: each rank sums one slice of the tensor and sends the sum to all others. For large messages.

It sends the bytes of a ring in two rounds instead of 2 (N-1). Flash AllReduce is its quantized form.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.entry import Entry, Setting, Work
from tightwire.comm.codec.error_bounds import rank_order_bound
from tightwire.comm.codec.slices import as_bytes, slice_lengths, sum_in_rank_order
from tightwire.comm.group.group import Group


class TwoShotAllReduce(BaseAllReduce):
    """exchange(slices), sum this rank's slice in rank order, gather(sums).

    Cost: M - s to reduce and (N-1) * s to gather, where s is this rank's slice of about M/N: 2 (N-1)/N * M when N
    divides the elements. Exactness: as one-shot; the owner sums a slice once, so all ranks hold the same bits.
    """

    name = "two-shot"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        if group.transport.fused is not None:
            self._fused = group.transport.fused.two_shot

    def _reduce(self, x_N: Tensor) -> Tensor:
        lengths = [n * x_N.element_size() for n in slice_lengths(x_N.numel(), self.world_size)]
        received = self._transport.exchange(as_bytes(x_N).split(lengths))
        own_sum = sum_in_rank_order([buf.view(x_N.dtype) for buf in received])
        return torch.cat(self._transport.gather(as_bytes(own_sum), lengths)).view(x_N.dtype)

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return two_shot_bytes(self.rank, self.world_size, num_elems, elem_bytes)

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        return rank_order_bound(inputs)


def two_shot_bytes(rank: int, world_size: int, num_elems: int, elem_bytes: int) -> int:
    """Bytes that ``rank`` sends: all slices but its own, then the sum of its own slice to all others."""
    if world_size == 1:
        return 0
    own = slice_lengths(num_elems, world_size)[rank]
    return (num_elems + (world_size - 2) * own) * elem_bytes


def _work(setting: Setting, num_bytes: int) -> Work:
    return Work(2, 2 * ((setting.world_size - 1) / setting.world_size) * num_bytes, num_bytes / setting.elem_bytes)


def _wire_bytes(setting: Setting, num_bytes: int) -> int:
    return two_shot_bytes(0, setting.world_size, num_bytes // setting.elem_bytes, setting.elem_bytes)


ENTRY = Entry(name="two-shot", make=TwoShotAllReduce, work=_work, wire_bytes=_wire_bytes, preference=2)
