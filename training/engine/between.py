"""Interface of a between-node slot, which sums gradients over replicas. ``training.between`` implements it."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Between(Protocol):
    """Sums flat float32 gradients over the ranks that hold the same shard: one rank of each node.

    With sharding ``none`` these are all ranks. Calls are collective, one per unit and step: all ranks of the group call
    in the same order, from the thread of the reduce lane.
    """

    name: str

    def __call__(self, unit: str, sum_N: Tensor) -> Tensor:
        """Turn (N,) this node's sum of ``unit``'s gradients into (N,) the sum over nodes; same bits on every rank.

        The engine, not the slot, divides by the number of ranks. The slot may overwrite ``sum_N``; the result may share
        its memory.

        Raises:
            RuntimeError: a slot with state was called twice for ``unit`` in one step; add up micro-batches first.
            CommError: a rank did not take part; the group cannot be used any more.
        """
        ...

    def step_done(self) -> None:
        """Called once per step, after all units are summed and before the optimizer steps."""
        ...

    def wire_bytes(self, unit: str) -> int:
        """Exact number of bytes that this rank sends to other nodes in the next call for ``unit``."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state kept from step to step, {} if none. Its tensors are not copied."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict`` of the same units.

        Raises:
            ValueError: units or sizes differ. To change the number of ranks, resume from a checkpoint.
        """
        ...
