"""Defines how each sharding splits weights, gradients and optimizer state.

The ranks of a *shard group* hold different shards of a bucket; the ranks of a *replica group* hold the same shard.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple


class GroupShape(NamedTuple):
    """The number of nodes of a shard group and its ranks per node."""

    num_nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one sharding splits the buckets.

    ``shard_over``: the ranks that hold shards of a bucket. ``keep_weights``: whole weights stay between steps. ``reduce_when``:
    ``step`` accumulates whole gradients and sums them over ranks once a step; ``backward`` sums a block's gradients after its
    backward in each micro-batch and keeps only shards.
    """

    name: str
    shard_over: Literal["self", "node", "world"]
    keep_weights: bool
    reduce_when: Literal["step", "backward"]

    def shard_group(self, num_nodes: int, ranks_per_node: int) -> GroupShape:
        sizes = {"self": (1, 1), "node": (1, ranks_per_node), "world": (num_nodes, ranks_per_node)}
        return GroupShape(*sizes[self.shard_over])

    def shard_ranks(self, world_size: int, num_nodes: int) -> int:
        return self.shard_group(num_nodes, world_size // num_nodes).world_size


SHARDINGS = {
    sharding.name: sharding
    for sharding in (
        Sharding("none", "self", keep_weights=True, reduce_when="step"),
        Sharding("zero1", "world", keep_weights=True, reduce_when="step"),
        Sharding("zero2", "world", keep_weights=True, reduce_when="backward"),
        Sharding("zero3", "world", keep_weights=False, reduce_when="backward"),
        Sharding("hybrid", "node", keep_weights=False, reduce_when="backward"),
    )
}
