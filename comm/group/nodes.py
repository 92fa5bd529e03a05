"""Subgroups of a group on several nodes, inside and across them, and of ranks that share weights; errors name group-wide ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import ParamSpec, TypeVar, Unpack

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, CommError, renumbered
from tightwire.comm.group.group import Group, JoinOptions, NodeGroups, in_process_groups, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.link import Link
from tightwire.comm.transport.emulated import ThrottledTransport
from tightwire.comm.transport.store_notes import FailureNotes, Note

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

_NOTES_S = 2.0  # the longest wait for failure notes: a failure may reach a rank through either subgroup
_PROBES, _PROBE_S, _PROBE_BYTES = 3, 0.25, 32 << 20  # attempts, and the limits of time and bytes for each


def join_nodes(
    group: Group,
    topology: Topology,
    *,
    store: Store,
    name: str = "ranks",
    segment_fd: int | None = None,
    **options: Unpack[JoinOptions],
) -> Group:
    """Add this rank's subgroups to ``group``, if there are several nodes. Collective.

    ``topology`` describes ``group``, and ``segment_fd`` is memory that the ranks of this node share. The other arguments
    are those of ``open_process_group``. Raises ValueError if the ranks have different numbers of nodes,
    CollectiveTimeoutError with the ranks that did not join.
    """
    told = [int(num_nodes) for (num_nodes,) in group.gather_numbers([topology.num_nodes])]
    if len(set(told)) > 1:
        raise ValueError(f"ranks 0 to {group.world_size - 1} have different numbers of nodes: {told}")
    if topology.num_nodes == 1:
        return group
    join = partial(
        open_process_group, store=store, device=group.device, timeout_s=group.timeout_s, ledger=group.ledger, **options
    )
    of_node = Topology(topology.node_rank, topology.ranks_per_node)
    inside = join(of_node, name=f"{name}/node-{topology.node}", segment_fd=segment_fd)
    try:
        across = join(Topology(topology.node, topology.num_nodes), name=f"{name}/across-{topology.node_rank}")
    except CommError:
        inside.close()
        raise
    notes = FailureNotes(PrefixStore(f"tightwire/{name}/nodes", store), group.rank, group.world_size)
    return replace(group, nodes=NodeGroups(inside=inside, across=across, notes=notes))


def in_process_node_groups(world_size: int, num_nodes: int, timeout_s: float = 30.0) -> list[Group]:
    """Like ``in_process_groups``, with the ranks on ``num_nodes`` nodes."""
    places = [Topology(rank, world_size, num_nodes=num_nodes) for rank in range(world_size)]
    groups, per_node = in_process_groups(world_size, timeout_s), world_size // num_nodes
    if num_nodes == 1:
        return groups
    ledgers = [group.ledger for group in groups]
    insides = [
        in_process_groups(per_node, timeout_s, ledgers[start : start + per_node])
        for start in range(0, world_size, per_node)
    ]
    acrosses = [in_process_groups(num_nodes, timeout_s, ledgers[place::per_node]) for place in range(per_node)]
    return [
        replace(group, nodes=NodeGroups(inside=insides[at.node][at.node_rank], across=acrosses[at.node_rank][at.node]))
        for group, at in zip(groups, places, strict=True)
    ]


def run_leg(
    group: Group, leg: Group, fn: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
) -> _Result:
    """Call ``fn(...)``, which communicates over ``leg`` of ``group``; a CommError numbers ranks as in ``group``."""
    try:
        return fn(*args, **kwargs)
    except CommError as error:
        if group.nodes is None or leg is group:
            raise
        raise _explain(group, group.nodes, leg, error) from error


def ranks_of(nodes: NodeGroups, leg: Group) -> list[int]:
    node, per_node = nodes.across.rank, nodes.inside.world_size
    if leg is nodes.inside:
        return [node * per_node + place for place in range(per_node)]
    return [other * per_node + nodes.inside.rank for other in range(nodes.across.world_size)]


def _explain(group: Group, nodes: NodeGroups, leg: Group, error: CommError) -> CommError:
    ranks = ranks_of(nodes, leg)
    culprits = {ranks[rank] for rank in error.ranks}
    # Other ranks may wait for this rank in the subgroup that did not fail. Closing both makes them fail now.
    nodes.inside.close()
    nodes.across.close()
    if nodes.notes is not None:
        doing = f"rank {group.rank} in {group.ledger.current() or 'a leg between nodes'}"
        own = Note(timed_out=isinstance(error, CollectiveTimeoutError), missed=tuple(sorted(culprits)), doing=doing)
        culprits, _ = nodes.notes.blame(own, group.timeout_s, _NOTES_S)
    where = f"{'inside' if leg is nodes.inside else 'across'} nodes"
    return renumbered(error, ranks, where, group.rank, group.world_size, culprits)


def throttle_group(group: Group, link: Link, beside: Group | None = None) -> Group:
    """Return ``group`` with ``link`` emulated on its own transport and on the transport across nodes.

    ``beside``: a throttled group of this rank, whose bytes take the same link.
    """
    of_link = beside.transport if beside and isinstance(beside.transport, ThrottledTransport) else None
    slow = replace(group, transport=ThrottledTransport(group.transport, link, of_link))
    if slow.nodes is None:
        return slow
    across = replace(slow.nodes.across, transport=ThrottledTransport(slow.nodes.across.transport, link))
    return replace(slow, nodes=replace(slow.nodes, across=across))


def held_rate(group: Group, link: Link) -> float:
    """Measure the bytes per second that the slowest rank of ``group`` can send over ``link``. Collective.

    The best of a few exchanges, because other load only slows them. Cost: at most 1 s or four 32 MiB exchanges.
    """
    others = max(1, group.world_size - 1)
    total = _PROBE_BYTES if link.bytes_per_s is None else min(_PROBE_BYTES, int(link.bytes_per_s * _PROBE_S))
    slices = [torch.zeros(max(1, total // others), dtype=torch.uint8) for _ in range(group.world_size)]
    group.transport.exchange(slices)  # the first exchange touches the memory
    seconds: list[float] = []
    for _ in range(_PROBES):
        group.transport.barrier()
        start = time.perf_counter()
        group.transport.exchange(slices)
        seconds.append(max(time.perf_counter() - start - link.latency_s, 1e-9))
    return min(rate for (rate,) in group.gather_numbers([others * slices[0].numel() / min(seconds)]))


# Loading has no deadline of its own: the parent process ends all ranks when one of them fails.
_LOAD_DEADLINE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class PartitionPlace:
    """A rank's place among the ranks with its shard: ``num_nodes`` nodes with ``per_node`` such ranks each.

    Rank d * tp + t holds shard t of replica d. Ranks of one node with the same shard can each keep a part of it and gather
    the rest when they need it (hpZ of ZeRO++, arXiv 2306.10209), on a thread of their own.
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

    def numbered(self, error: CommError) -> CommError:
        """Convert an error of the ranks ``inside``, which are numbered from 0 there."""
        where = "among the ranks of its node with the same weights"
        return renumbered(error, self.inside, where, self.topology.rank, self.topology.world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPeers:
    """One rank's group of the ranks on its node that hold the same shard, with its own ledger.

    ``await_all`` waits until all ranks of the shard, on all nodes, have called it equally often.
    """

    at: PartitionPlace
    inside: Group
    await_all: Callable[[], None]

    def close(self) -> None:
        self.inside.close()


def join_partition(
    at: PartitionPlace,
    *,
    store: Store,
    device: torch.device,
    timeout_s: float,
    segment_fd: int | None,
    **options: Unpack[JoinOptions],
) -> PartitionPeers:
    """Join the ranks with the same shard. All ranks of the world call this.

    The arguments are those of ``open_process_group``. ``timeout_s`` must exceed the time a rank computes between two layers, and
    the ranks ``at.inside`` share ``segment_fd``. Errors have the ranks' numbers in the world.
    """
    name = f"partition/shard-{at.shard}"
    inside = open_process_group(
        Topology(at.place, at.per_node),
        store=store,
        device=device,
        timeout_s=timeout_s,
        name=f"{name}/node-{at.topology.node}",
        segment_fd=segment_fd,
        numbered=at.numbered,
        **options,
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
