"""The ranks that hold the same weights: who they are among tp x dp ranks on several nodes, and their groups.

Rank d * tp + t holds shard t, for replica d. What the ranks of one node hold twice, each of them could keep a part of, and
have the rest from the others when it is needed (hpZ of ZeRO++, arXiv 2306.10209): *inside* is their group. *Across* are the
ranks that have one's own place on the other nodes; with them a node's copy is made, once, when weights are loaded.

Neither is shared with anything else: what they carry goes on beside the AllReduces, on a thread of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.collectives.collectives import broadcast
from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.group.nodes import join_legs, renumbered
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Ledger

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Reading has no deadline of its own: whoever started the ranks ends them when one of them fails.
_LOAD_DEADLINE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class PartitionPlace:
    """Where a rank stands among those with its shard: ``num_nodes`` nodes with ``per_node`` of them each.

    All that is shared out is shared out in the order of ``index``: place by place, and of a place node by node. So neighbours
    are on different nodes, and what a node keeps of one place lies together.
    """

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
        """On its node."""
        return self.topology.node_rank // self.tp

    @property
    def index(self) -> int:
        return self.place * self.num_nodes + self.node

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of this node, as the world numbers them."""
        return tuple(self._rank(self.node, place) for place in range(self.per_node))

    @property
    def across(self) -> tuple[int, ...]:
        return tuple(self._rank(node, self.place) for node in range(self.num_nodes))

    def _rank(self, node: int, place: int) -> int:
        return node * self.topology.ranks_per_node + place * self.tp + self.shard


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPeers:
    """One rank's groups among those with its shard. Their ledgers are their own: ``across`` has what passes between nodes.

    ``meet`` waits without a deadline until all of them, on all nodes, have called it as often.
    """

    at: PartitionPlace
    inside: Group
    across: Group
    meet: Callable[[], None]

    def count_as(self, phase: str) -> None:
        """From now on the ledgers have what passes under this phase, for the site ``weights``."""
        for leg in (self.inside, self.across):
            leg.ledger.phase, leg.ledger.site = phase, "weights"

    def run(self, leg: Group, fn: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """``fn(...)``, which talks over ``leg``, one of the two groups.

        Raises:
            CommError: as the leg's transport says, but with ranks numbered as in the world.
        """
        try:
            return fn(*args, **kwargs)
        except CommError as error:
            where, ranks = ("inside", self.at.inside) if leg is self.inside else ("across", self.at.across)
            culprits = [ranks[rank] for rank in error.ranks]
            topology, where = self.at.topology, f"with whom it shares weights {where} nodes"
            raise renumbered(error, ranks, where, topology.rank, topology.world_size, culprits) from error

    def share(self, x: Tensor, index: int) -> Tensor:
        """``x`` of the rank with that ``index``, on all that hold its shard; those give a tensor of its shape and dtype.

        Cost: that rank sends (n-1) M to other nodes; on each of the n nodes one sends (R-1) M inside.
        """
        place, node = divmod(index, self.at.num_nodes)
        if self.at.place == place:
            x = self.run(self.across, broadcast, self.across, x, node)
        return self.run(self.inside, broadcast, self.inside, x, place)

    def close(self) -> None:
        """Drop the connections. May be called twice, and by another thread than the one that waits for others."""
        self.inside.close()
        self.across.close()


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
    """Join the ranks with this one's shard. All ranks of the world call this.

    Args:
        store, device, join_timeout_s, name, interface: as for ``comm.group.open_process_group``.
        timeout_s: the same; above what a rank may compute between two layers, as who gathers waits for the slowest.
        segment_fd: memory that the ranks ``at.inside`` share (``comm.transport.segment``, made for ``at.per_node``).
    Raises:
        CollectiveTimeoutError: some ranks did not join in time; names them as their group does.
    """

    name = f"{name}/shard-{at.shard}"
    inside, across = join_legs(
        Topology(at.node * at.per_node + at.place, at.num_ranks, num_nodes=at.num_nodes),
        store=store,
        device=device,
        timeout_s=timeout_s,
        join_timeout_s=join_timeout_s,
        name=name,
        interface=interface,
        segment_fd=segment_fd,
    )
    return PartitionPeers(at=at, inside=inside, across=across, meet=_meeting(store, name, at))


def in_process_partition(
    tp: int, world_size: int, num_nodes: int = 1, timeout_s: float = 30.0, meet_timeout_s: float = 120.0
) -> list[PartitionPeers]:
    """By rank of the world, all in this process; give each to a thread of its own. ``timeout_s``: of collectives."""
    places = [PartitionPlace(tp, Topology(rank, world_size, num_nodes=num_nodes)) for rank in range(world_size)]
    groups: dict[tuple[str, tuple[int, ...]], list[Group]] = {}
    store = HashStore()

    def group_of(leg: str, ranks: tuple[int, ...], rank: int) -> Group:
        if (leg, ranks) not in groups:
            groups[leg, ranks] = in_process_groups(len(ranks), timeout_s, [Ledger() for _ in ranks])
        return groups[leg, ranks][ranks.index(rank)]

    return [
        PartitionPeers(
            at=at,
            inside=group_of("inside", at.inside, rank),
            across=group_of("across", at.across, rank),
            meet=_meeting(store, f"shard-{at.shard}", at, timedelta(seconds=meet_timeout_s)),
        )
        for rank, at in enumerate(places)
    ]


def _meeting(store: Store, name: str, at: PartitionPlace, deadline: timedelta = _LOAD_DEADLINE) -> Callable[[], None]:
    met = PrefixStore(f"tightwire/{name}/met", store)
    times = 0

    def meet() -> None:
        nonlocal times
        times += 1
        met.set(f"{times}/{at.index}", "")
        met.wait([f"{times}/{index}" for index in range(at.num_ranks)], deadline)

    return meet
