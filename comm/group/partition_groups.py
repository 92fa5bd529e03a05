"""Groups of the ranks on one node that hold the same weights, among tp x dp ranks on several nodes.

Rank d * tp + t holds shard t of replica d. Ranks of one node with the same shard can each keep a part of it and gather the
rest when they need it (hpZ of ZeRO++, arXiv 2306.10209). The group is separate from the AllReduce group and runs beside it,
on its own thread.
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
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @property
    def per_node(self) -> int:
        return self.topology.ranks_per_node // self.tp

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.per_node

    @property
    def shard(self) -> int:
        return self.topology.rank % self.tp

    @property
    def node(self) -> int:
        return self.topology.node

    @property
    def place(self) -> int:
        """The place of this rank on its node."""
        return self.topology.node_rank // self.tp

    @property
    def index(self) -> int:
        """The place among all ranks of the shard, node by node."""
        return self.node * self.per_node + self.place

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of this node with this shard, numbered as in the world."""
        return tuple(self._rank(self.node, place) for place in range(self.per_node))

    def _rank(self, node: int, place: int) -> int:
        return node * self.topology.ranks_per_node + place * self.tp + self.shard


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPeers:
    """One rank's group of the ranks on its node that hold the same shard, with its own ledger.

    ``await_all`` waits until all ranks of the shard, on all nodes, have called it equally often. Its deadline is 24 hours.
    """

    at: PartitionPlace
    inside: Group
    await_all: Callable[[], None]

    def run(self, fn: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Call ``fn(...)``, which uses the group ``inside``.

        Raises:
            CommError: the error of the group's transport, with ranks numbered as in the world.
        """
        try:
            return fn(*args, **kwargs)
        except CommError as error:
            ranks, topology = self.at.inside, self.at.topology
            culprits = [ranks[rank] for rank in error.ranks]
            where = "among the ranks of its node with the same weights"
            raise renumbered(error, ranks, where, topology.rank, topology.world_size, culprits) from error

    def close(self) -> None:
        """Drop the connections. May be called twice, and from another thread than the one that waits."""
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

    Args:
        store, device, join_timeout_s, name, interface: as for ``comm.group.open_process_group``.
        timeout_s: the longest wait in a collective. It must exceed the time a rank computes between two layers.
        segment_fd: memory that the ranks ``at.inside`` share (``comm.transport.segment``, made for ``at.per_node``).
    Raises:
        CollectiveTimeoutError: some ranks did not join in time; names them with the numbers of their own group.
    """
    name = f"{name}/shard-{at.shard}"
    inside = open_process_group(
        Topology(at.place, at.per_node),
        store=store,
        device=device,
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
        name=f"{name}/node-{at.node}",
        interface=interface,
        segment_fd=segment_fd if at.per_node > 1 else None,
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
        arrived.set(f"{times}/{at.index}", "")
        arrived.wait([f"{times}/{index}" for index in range(at.num_ranks)], deadline)

    return await_all
