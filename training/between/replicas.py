"""The shards a slot sums and the ranks that hold copies of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.training.engine.units import UnitShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """This rank's shards by unit, and the groups that a slot communicates over.

    ``group``: the ranks that hold the same shards, one of each node. ``inside``: the ranks that together hold this
    node's sum, None if that is this rank alone; only clipping needs it.
    ``weights``: returns the float32 shard of a unit's parameters; only weight decay needs it.
    """

    group: Group
    units: Mapping[str, UnitShard]
    inside: Group | None = None
    weights: Callable[[str], Tensor] | None = None

    @property
    def gradients_per_node(self) -> int:
        """Number of ranks whose gradients are summed in a slot's input."""
        return 1 if self.inside is None else self.inside.world_size

    @property
    def num_gradients(self) -> int:
        """Number of ranks whose gradients are summed in a slot's result; the engine divides by it."""
        return self.group.world_size * self.gradients_per_node

    def shard(self, unit: str) -> UnitShard:
        if unit not in self.units:
            raise ValueError(f"no unit {unit!r}; there are {', '.join(self.units)}")
        return self.units[unit]
