"""Groups of the ranks on one node that hold the same weights, among tp x dp ranks on several nodes.

Rank d * tp + t holds shard t of replica d. Ranks of one node with the same shard can each keep a part of it and gather
the rest when they need it (hpZ of ZeRO++, arXiv 2306.10209), on a thread of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.nodes import renumbered
from tightwire.comm.group.topology import Topology

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Loading has no deadline of its own: the parent process ends all ranks when one of them fails.
_LOAD_DEADLINE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class PartitionPlace:
    """A rank's place among the ranks with its shard: ``num_nodes`` nodes with ``per_node`` such ranks each."""

    tp: int
    topology: Topology

    def __post_init__(self) -> None:
        world_size, num_nodes = self.topology.world_size, self.topology.num_nodes
        if world_size % self.tp:
            raise ValueError(f"{world_size} ranks are not whole replicas of --tp {self.tp}")
        if self.topology.ranks_per_node % self.tp:
            raise ValueError(
                f"{world_size // self.tp} replicas of {self.tp} ranks cannot be on {num_nodes} nodes: each node's "
                f"{self.topology.ranks_per_node} ranks must be whole replicas; use a number of nodes that divides the replicas"
            )

    @property
    def per_node(self) -> int:
        return self.topology.ranks_per_node // self.tp

    @property
    def shard(self) -> int:
        return self.topology.rank % self.tp

    @property
    def place(self) -> int:
        return self.topology.node_rank // self.tp

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of this node with this shard, numbered as in the world."""
        first = self.topology.node * self.topology.ranks_per_node
        return tuple(range(first + self.shard, first + self.topology.ranks_per_node, self.tp))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPeers:
    """One rank's group of the ranks on its node that hold the same shard, with its own ledger.

    ``await_all`` waits until all ranks of the shard, on all nodes, have called it equally often.
    """

    at: PartitionPlace
    inside: Group
    await_all: Callable[[], None]

    def run(self, fn: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Call ``fn(...)``, which uses the group ``inside``. A CommError has the ranks' numbers in the world."""
        try:
            return fn(*args, **kwargs)
        except CommError as error:
            ranks, topology = self.at.inside, self.at.topology
            culprits = [ranks[rank] for rank in error.ranks]
            where = "among the ranks of its node with the same weights"
            raise renumbered(error, ranks, where, topology.rank, topology.world_size, culprits) from error

    def close(self) -> None:
        self.inside.close()


def join_partition(
    at: PartitionPlace,
    *,
    store: Store,
    device: torch.device,
    timeout_s: float = 60.0,
    join_timeout_s: float | None = None,
    name: str = "partition",
    interface: str | None = None,
    segment_fd: int | None = None,
) -> PartitionPeers:
    """Join the ranks with the same shard. All ranks of the world call this.

    Arguments as for ``open_process_group``: ``timeout_s`` must exceed the time a rank computes between two layers, and
    the ranks ``at.inside`` share ``segment_fd``. In ``CollectiveTimeoutError`` ranks have the numbers of their own
    group.
    """
    name = f"{name}/shard-{at.shard}"
    inside = open_process_group(
        Topology(at.place, at.per_node),
        store=store,
        device=device,
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
        name=f"{name}/node-{at.topology.node}",
        interface=interface,
        segment_fd=segment_fd,
    )
    return PartitionPeers(at=at, inside=inside, await_all=make_barrier(store, name, at))


def make_barrier(
    store: Store, name: str, at: PartitionPlace, deadline: timedelta = _LOAD_DEADLINE
) -> Callable[[], None]:
    arrived = PrefixStore(f"tightwire/{name}/arrived", store)
    times = 0

    def await_all() -> None:
        nonlocal times
        times += 1
        arrived.set(f"{times}/{at.topology.rank}", "")
        arrived.wait([f"{times}/{rank}" for rank in range(at.shard, at.topology.world_size, at.tp)], deadline)

    return await_all
