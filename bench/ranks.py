"""Starts rank processes on this machine and joins them in one group, with an emulated link between nodes.

with open_ranks(RankOptions(ranks=2)) as (ranks, facts):
    for rank, event in ranks.stream(measure, plan):        # on every rank: measure(group, plan) is a generator
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.bench.options import RankOptions
from tightwire.comm.all_reduce import make
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.local_ranks import LocalRanks, fd_path, silence_after
from tightwire.comm.group.nodes import join_nodes, throttle_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.emulated_network import EmulatedNode
from tightwire.comm.link.link import Link
from tightwire.comm.link.wire import Wire, open_wire
from tightwire.comm.transport.segment import make_segment, why_unusable
from tightwire.comm.transport.socket_join import SocketOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """The facts that a rank process needs to join, the same on every rank. Segments are paths to shared memory."""

    world_size: int
    timeout_s: float
    store_path: str
    segment: str | None = None  # all ranks' segment; without it torch.distributed carries everything
    num_nodes: int = 1
    device: str = "cpu"
    node_segments: tuple[str | None, ...] = ()  # of each node's ranks
    peer_blocks: int = 0  # of a kernel that sums over peer memory; 0: the library sums
    sockets: bool = False  # between ranks that share no segment
    network: tuple[EmulatedNode, ...] = ()  # of each node's ranks; (): the machine's own network
    throttle: Link | None = None  # slows the transport itself, where the kernel does not


@contextmanager
def open_ranks(options: RankOptions, preload: Sequence[ModuleType] = ()) -> Iterator[tuple[LocalRanks, dict[str, Any]]]:
    """The running ranks, and facts about their transport and link for the result.

    ``preload``: modules that are imported once for all ranks of this process. Raises ValueError if this machine does not
    support the options, LocalRankError if the ranks could not join.
    """
    transport = _choose_transport(options)
    with ExitStack() as stack:
        wire, link_facts = _open_wire(options, stack)
        shares_nodes = transport == "shared-memory" or (options.link is not None and why_unusable() is None)
        has_node_segments = shares_nodes and 1 < options.ranks_per_node < options.ranks
        plan = GroupPlan(
            world_size=options.ranks,
            timeout_s=options.timeout_s,
            store_path=_path_of(stack, os.memfd_create("tightwire-store")),
            segment=_segment(stack, options.ranks, transport == "shared-memory"),
            num_nodes=options.num_nodes,
            device=options.device,
            node_segments=tuple(
                _segment(stack, options.ranks_per_node, has_node_segments) for _ in range(options.num_nodes)
            ),
            peer_blocks=options.peer_blocks if transport == "peer-memory" else 0,
            sockets=options.device == "cpu" and transport != "process-group",
            network=wire.nodes if wire else (),
            throttle=wire.throttle if wire else None,
        )
        ranks = stack.enter_context(
            LocalRanks(
                options.ranks,
                partial(open_group, plan),
                silence_s=silence_after(options.timeout_s),
                preload=(make, *preload),
            )
        )
        found = list(ranks.stream(_has_peer_memory)) if plan.peer_blocks else []  # to the stream's end
        if not all(has for _, has in found):
            if options.transport == "peer-memory":
                raise ValueError("--transport peer-memory does not work here; the log of the ranks above says why")
            transport = "process-group"
        yield ranks, {"transport": transport, "link": link_facts}


def open_group(plan: GroupPlan, rank: int) -> Group:
    """Join ``plan``'s group; runs in the rank's process."""
    topology = Topology(rank, plan.world_size, num_nodes=plan.num_nodes)
    interface = None
    if plan.network:
        node = plan.network[topology.node]
        node.enter()
        interface = node.interface
    if plan.device == "cuda":
        torch.cuda.set_device(rank)
    store, sockets = FileStore(plan.store_path, plan.world_size), SocketOptions() if plan.sockets else None
    group = open_process_group(
        topology,
        store=store,
        device=torch.device("cuda", rank) if plan.device == "cuda" else torch.device("cpu"),
        timeout_s=plan.timeout_s,
        interface=interface,
        segment_fd=_open(plan.segment),
        sockets=sockets,
        peer_blocks=plan.peer_blocks,
    )
    if plan.num_nodes > 1:
        segment_fd = _open(plan.node_segments[topology.node])
        group = join_nodes(group, topology, store=store, interface=interface, segment_fd=segment_fd, sockets=sockets)
    return group if plan.throttle is None else throttle_group(group, plan.throttle)


def _has_peer_memory(group: Group) -> Iterator[bool]:
    """True if this rank sums through peer memory; otherwise the rank has logged the reason."""
    yield group.transport.fused is not None


def _open_wire(options: RankOptions, stack: ExitStack) -> tuple[Wire | None, dict[str, Any] | None]:
    if options.link is None:
        return None, None
    wire = stack.enter_context(
        open_wire(options.link, num_nodes=options.num_nodes, ranks_per_node=options.ranks_per_node)
    )
    measured, reason = wire.facts.measured_bytes_per_s, wire.facts.reason
    facts = {**asdict(options.link), "how": wire.facts.how, "measured_bytes_per_s": measured}
    return wire, facts | ({"why": reason} if reason else {})


def _choose_transport(options: RankOptions) -> str:
    if options.device == "cuda":
        if torch.cuda.device_count() < options.ranks:
            raise ValueError(
                f"--device cuda needs a device per rank: {options.ranks} ranks, {torch.cuda.device_count()} devices"
            )
        return "peer-memory" if options.transport == "auto" else options.transport
    reason = why_unusable()
    if options.transport == "shared-memory" and reason:
        raise ValueError(f"--transport shared-memory does not work here: {reason}; use --transport sockets")
    if options.transport == "auto":
        return "sockets" if reason or options.num_nodes > 1 else "shared-memory"
    return options.transport


def _segment(stack: ExitStack, world_size: int, wanted: bool) -> str | None:
    return _path_of(stack, make_segment(world_size)) if wanted else None


def _path_of(stack: ExitStack, fd: int) -> str:
    stack.callback(os.close, fd)
    return fd_path(fd)


def _open(path: str | None) -> int | None:
    return None if path is None else os.open(path, os.O_RDWR)
