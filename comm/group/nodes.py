"""Subgroups of a group on several nodes: one inside each node and one across nodes, with errors in group-wide ranks.

A node is a host, a socket of one host, or an arbitrary part of one host's ranks for testing hierarchical algorithms.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks
from tightwire.comm.group.group import Group, NodeGroups, in_process_groups, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.link.link import Link
from tightwire.comm.transport.emulated import ThrottledTransport
from tightwire.comm.transport.store_notes import FailureNotes, Note, ranks_at_fault

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# The longest wait for other ranks' failure notes. A failure may reach a rank through either subgroup.
_GRACE_S = 2.0
_GRACE_SHARE = 0.2
_PROBES, _PROBE_S, _PROBE_BYTES = 3, 0.1, 32 << 20  # attempts, and the limits of time and bytes for each


def join_nodes(
    group: Group,
    topology: Topology,
    *,
    store: Store,
    join_timeout_s: float | None = None,
    name: str = "ranks",
    interface: str | None = None,
    segment_fd: int | None = None,
) -> Group:
    """Add this rank's subgroups (inside its node and across nodes) to ``group``, if there are several nodes. Collective.

    Args:
        topology: the one that ``group`` was opened with.
        store, join_timeout_s, name, interface: as for ``comm.group.group.open_process_group``.
        segment_fd: memory that the ranks of this node share (``comm.transport.segment``, made for ``topology.ranks_per_node``).
    Raises:
        ValueError: the ranks have different numbers of nodes.
        CollectiveTimeoutError: some ranks did not join in time; names them.
    """
    own = torch.tensor([topology.num_nodes], device=group.device).view(torch.uint8)
    told = [int(buf.view(torch.int64)) for buf in group.transport.gather(own)]
    if len(set(told)) > 1:
        raise ValueError(f"ranks 0 to {group.world_size - 1} have different numbers of nodes: {told}")
    if topology.num_nodes == 1:
        return group

    inside, across = join_legs(
        topology,
        store=store,
        device=group.device,
        timeout_s=group.timeout_s,
        join_timeout_s=join_timeout_s,
        name=name,
        interface=interface,
        segment_fd=segment_fd,
        ledger=group.ledger,
    )
    notes = FailureNotes(PrefixStore(f"tightwire/{name}/nodes", store), group.rank, group.world_size)
    return replace(group, nodes=NodeGroups(inside=inside, across=across, notes=notes))


def join_legs(
    at: Topology,
    *,
    store: Store,
    device: torch.device,
    timeout_s: float,
    join_timeout_s: float | None,
    name: str,
    interface: str | None,
    segment_fd: int | None,
    ledger: Ledger | None = None,
) -> tuple[Group, Group]:
    """Open the group inside this rank's node and the group across nodes; arguments as for ``join_nodes``.

    Raises:
        CommError: one of the groups cannot be joined. Neither stays open.
    """

    def join(rank: int, world_size: int, name: str, segment_fd: int | None) -> Group:
        return open_process_group(
            Topology(rank, world_size),
            store=store,
            device=device,
            timeout_s=timeout_s,
            join_timeout_s=join_timeout_s,
            name=name,
            interface=interface,
            segment_fd=segment_fd if world_size > 1 else None,
            ledger=ledger,
        )

    inside = join(at.node_rank, at.ranks_per_node, f"{name}/node-{at.node}", segment_fd)
    try:
        return inside, join(at.node, at.num_nodes, f"{name}/across-{at.node_rank}", None)
    except CommError:
        inside.close()
        raise


def renumbered(
    error: CommError, ranks: Sequence[int], where: str, rank: int, world_size: int, culprits: Collection[int]
) -> CommError:
    """Convert ``error`` of a subgroup with these ``ranks``; ``culprits`` are group-wide ranks."""
    return type(error)(
        f"rank {rank} lost {name_ranks(culprits)} of {world_size} {where}; from here on ranks "
        f"{', '.join(map(str, ranks))} are numbered from 0: {error}",
        culprits,
    )


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
    """Call ``fn(...)``, which communicates over ``leg``: one of the groups of ``group.nodes``, or ``group`` itself.

    Raises:
        CommError: the error of the leg's transport, which names the ranks that caused it, numbered as in ``group``.
    """
    try:
        return fn(*args, **kwargs)
    except CommError as error:
        if group.nodes is None or leg is group:
            raise
        raise _explain(group, group.nodes, leg, error) from error


def ranks_of(nodes: NodeGroups, leg: Group) -> list[int]:
    """Return the ranks of ``leg``, one of ``nodes``, numbered as in the whole group."""
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
        notes = nodes.notes.exchange(own, grace_s=min(_GRACE_S, _GRACE_SHARE * group.timeout_s))
        others = [rank for rank in range(group.world_size) if rank != group.rank]
        culprits = ranks_at_fault(own, notes, others)
    where = f"{'inside' if leg is nodes.inside else 'across'} nodes"
    return renumbered(error, ranks, where, group.rank, group.world_size, culprits)


def throttle_group(group: Group, link: Link) -> Group:
    """Return ``group`` with ``link`` emulated on its own transport and on the transport across nodes."""
    slow = replace(group, transport=ThrottledTransport(group.transport, link))
    if slow.nodes is None:
        return slow
    across = slow.nodes.across
    slow_across = replace(across, transport=ThrottledTransport(across.transport, link))
    return replace(slow, nodes=replace(slow.nodes, across=slow_across))


def held_rate(group: Group, link: Link) -> float:
    """Measure the bytes per second that the slowest rank of ``group`` can send over ``link``. Collective.

    Uses the best of a few exchanges, because other load on the machine only slows them. Cost: 0.4 s, or the time of
    four 32 MiB exchanges if that is less.
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
    own = torch.tensor([others * slices[0].numel() / min(seconds)], dtype=torch.float64)
    return min(float(told.view(torch.float64)) for told in group.transport.gather(own.view(torch.uint8)))
