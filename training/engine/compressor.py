"""Interface of a gradient compressor, which sums gradients between replicas. ``training.compression`` implements it."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class GradientCompressor(Protocol):
    """Sums flat float32 gradients over the ranks that hold the same shard: one rank of each node, or all with sharding ``none``.

    Calls are collective, one per flat parameter and step, in the same order, from the thread of the reduce lane.
    """

    name: str

    def __call__(self, name: str, sum_N: Tensor) -> Tensor:
        """Turn (N,) this node's sum of a flat parameter's gradients into the sum over nodes; same bits on every rank.

        The engine divides by the number of ranks. ``sum_N`` may be overwritten; the result may share its memory.

        Raises:
            RuntimeError: a compressor with state was called twice for ``name`` in one step.
            CommError: a rank did not take part; the group cannot be used any more.
        """
        ...

    def step_done(self) -> None:
        """Called once per step, after all flat parameters are summed and before the optimizer steps."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state kept from step to step, {} if none. Its tensors are not copied."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``state_dict`` of the same flat parameters. Raises ValueError: names or sizes differ."""
        ...
