"""The shards that a compressor works on, and the ranks that hold the same ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.training.engine.units import UnitShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """This rank's shards by unit, and the ranks that hold the same ones.

    ``group``: one rank of each node, the slot's own group. ``inside``: the ranks that together hold this node's sum, a
    group of its own for the slot, which only clipping needs; None: this rank alone. ``weights``: the float32 shard
    of a unit's parameters, which only weight decay needs.
    """

    group: Group
    units: Mapping[str, UnitShard]
    inside: Group | None = None
    weights: Callable[[str], Tensor] | None = None

    @property
    def gradients_per_node(self) -> int:
        """How many ranks' gradients are added up in what a slot is given."""
        return 1 if self.inside is None else self.inside.world_size

    @property
    def num_gradients(self) -> int:
        """How many are added up in what it returns: what the engine divides by."""
        return self.group.world_size * self.gradients_per_node

    def shard(self, unit: str) -> UnitShard:
        if unit not in self.units:
            raise ValueError(f"no unit {unit!r}; there are {', '.join(self.units)}")
        return self.units[unit]
