"""Ring AllReduce: slices travel around the ranks and collect partial sums, then travel around once more.

Each rank sends to one neighbor only, which avoids congestion, but it waits 2 (N-1) times.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.entry import Setting, Work
from tightwire.comm.all_reduce.names import NAMES
from tightwire.comm.codec.codec import Carried, slice_lengths
from tightwire.comm.codec.error_bounds import rounded_hops_bound


class RingAllReduce(BaseAllReduce):
    """N-1 shifts that add, N-1 shifts that copy.

    Cost: 2 M less the two slices this rank does not send: 2 (N-1)/N * M when N divides the elements. Exactness: partial
    sums travel in the tensor's dtype, so each hop rounds once. Slice j is summed in the order j, j+1, ... around the
    ring, so with more than two ranks an element's sum depends on its slice. All ranks hold the bits of the rank that
    added last.
    """

    name = "ring"

    def _reduce(self, x_N: Tensor, carried: Carried) -> Tensor:
        num_ranks, rank, shift = self.world_size, self.rank, self._transport.shift
        lengths = slice_lengths(x_N.numel(), num_ranks)
        own = x_N.split(lengths)
        partial = own[rank]
        for hop in range(1, num_ranks):
            index = (rank - hop) % num_ranks
            received = shift(partial.view(torch.uint8), lengths[index] * x_N.element_size())
            partial = torch.add(received.view(x_N.dtype), own[index])
        slices = {(rank + 1) % num_ranks: partial}
        for hop in range(num_ranks - 1):
            index = (rank - hop) % num_ranks
            partial = shift(partial.view(torch.uint8), lengths[index] * x_N.element_size()).view(x_N.dtype)
            slices[index] = partial
        return torch.cat([slices[index] for index in range(num_ranks)])

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        lengths = slice_lengths(num_elems, self.world_size)
        unsent = lengths[(self.rank + 1) % self.world_size] + lengths[(self.rank + 2) % self.world_size]
        return (2 * num_elems - unsent) * elem_bytes

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        return rounded_hops_bound(inputs)


def ring_work(setting: Setting, num_bytes: int) -> Work:
    """N-1 rounds to add and N-1 to copy, with 1/N of the message in each."""
    ranks = setting.world_size
    return Work(2 * (ranks - 1), 2 * ((ranks - 1) / ranks) * num_bytes, num_bytes / setting.elem_bytes)


ENTRY = replace(
    NAMES["ring"],
    make=RingAllReduce,
    work=ring_work,
    depends_on_place=True,
    rounds="message",
    neighbours_only=True,
    preference=3,
)
