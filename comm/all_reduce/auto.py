"""The choice by size: one-shot while a message is small, two-shot when its bytes matter more than a round of waiting.

Both are exact and add in rank order with one rounding, so the switch changes no bit of the result: a row's sum does not
depend on how many rows travel with it.
"""

from collections.abc import Sequence

from torch import Tensor

from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.all_reduce.two_shot import TwoShotAllReduce
from tightwire.comm.group import Group
from tightwire.comm.protocols import AllReduce

# What one rank may send in one-shot before a second round of waiting costs less than the extra bytes. Through shared
# memory with 3 and 4 ranks the two cross between 144 and 864 KiB sent, over gloo higher (benchmarks/RESULTS.md).
_ONE_SHOT_BYTES = 384 << 10


class AutoAllReduce:
    """``one-shot`` or ``two-shot`` by message size; with two ranks always one-shot, which then sends no more.

    The ledger records the algorithm that ran, not this name.
    """

    name = "auto"
    lossless = True

    def __init__(self, group: Group) -> None:
        self._world_size = group.world_size
        self._one_shot, self._two_shot = OneShotAllReduce(group), TwoShotAllReduce(group)

    def __call__(self, x: Tensor) -> Tensor:
        return self.choose(x.numel(), x.element_size())(x)

    def choose(self, num_elems: int, elem_bytes: int) -> AllReduce:
        """The algorithm for a message of this size; the same on every rank."""
        if self._world_size <= 2 or self._one_shot.wire_bytes(num_elems, elem_bytes) <= _ONE_SHOT_BYTES:
            return self._one_shot
        return self._two_shot

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return self.choose(num_elems, elem_bytes).wire_bytes(num_elems, elem_bytes)

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        return self._one_shot.max_error(inputs)  # two-shot's is the same
