"""The seam between replicas: one call turns the sum of a shard group's gradients into that of all ranks.

``training.between`` has what may stand there.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Between(Protocol):
    """Sums flat float32 gradients over the ranks that hold the same shard, one rank of each node.

    With sharding ``none`` these are all ranks. Calls are collective, one for each unit in a step: all ranks of the group
    make the same ones in the same order, from one thread, the reduce lane.
    """

    name: str

    def __call__(self, unit: str, sum_N: Tensor) -> Tensor:
        """(N,) this node's sum of ``unit``'s gradients to (N,) the sum over all nodes, the same bits on every rank.

        Nothing is divided by the number of ranks; the engine does so once. ``sum_N`` is the slot's to overwrite, and
        the result may be the same memory.

        Raises:
            RuntimeError: a slot that keeps something from step to step was called twice for ``unit`` in one step; with
                accumulation, micro-batches are added up before.
            CommError: a rank did not come; the group is of no use any more.
        """
        ...

    def step_done(self) -> None:
        """All units have been summed, and the optimizer will step."""
        ...

    def wire_bytes(self, unit: str) -> int:
        """Bytes that this rank sends to other nodes in the next call for ``unit``, exactly."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What is kept from step to step, this rank's own; {} where nothing is. The tensors themselves, not copies."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a ``state_dict`` of the same units.

        Raises:
            ValueError: it is of other units or sizes; for other ranks a checkpoint is cut anew when a run resumes.
        """
        ...
