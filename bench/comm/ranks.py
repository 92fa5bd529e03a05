"""Starts rank processes on this machine and joins them: transport, nodes, and an emulated link between the nodes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.local_ranks import LocalRanks, fd_path, silence_after
from tightwire.comm.group.nodes import join_nodes, throttle_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.emulated_network import EmulatedNode
from tightwire.comm.link.link import Link
from tightwire.comm.link.wire import Wire, open_wire
from tightwire.comm.transport.segment import make_segment, why_unusable

TRANSPORTS = ("auto", "shared-memory", "process-group", "peer-memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """How many ranks to start and what joins them.

    Raises:
        ValueError: the values do not fit together.
    """

    ranks: int = 2
    nodes: int | None = None  # None: 1, or with a link one node for each rank
    device: str = "cpu"
    transport: str = "auto"
    link: Link | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.nodes is not None and (self.nodes < 1 or self.ranks % self.nodes):
            raise ValueError(f"--nodes must divide the {self.ranks} ranks evenly, got {self.nodes}")
        if self.link is not None and self.num_nodes < 2:
            raise ValueError("--link is between nodes, so --nodes must be at least 2")
        if self.link is not None and (self.transport == "shared-memory" or self.device != "cpu"):
            raise ValueError("--link joins CPU processes by sockets; leave out --transport and --device")
        if self.device != {"peer-memory": "cuda", "shared-memory": "cpu"}.get(self.transport, self.device):
            raise ValueError(f"--transport {self.transport} is not for --device {self.device}")

    @property
    def num_nodes(self) -> int:
        return self.nodes or (1 if self.link is None else self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """What a rank process needs to join; the same on every rank."""

    world_size: int
    num_nodes: int
    device: str
    timeout_s: float
    store_path: str
    segment: str | None = None  # a path that opens the memory of all ranks
    node_segments: tuple[str | None, ...] = ()  # the same for each node's ranks
    peer_memory: bool = False
    network: tuple[EmulatedNode, ...] = ()  # of each node's ranks; (): the machine's own network
    throttle: Link | None = None  # slows the transport itself, where the kernel does not


@contextmanager
def open_ranks(options: RankOptions) -> Iterator[tuple[LocalRanks, dict[str, Any]]]:
    """The running ranks, and facts about how they are joined, for the result.

    Raises:
        ValueError: this machine does not support what was asked for; says why.
        LocalRankError: the ranks could not join.
    """
    transport = _choose_transport(options)
    with ExitStack() as stack:
        wire, link_facts = _open_wire(options, stack)
        per_node = options.ranks // options.num_nodes
        shares_nodes = transport == "shared-memory" or (options.link is not None and why_unusable() is None)
        plan = GroupPlan(
            world_size=options.ranks,
            num_nodes=options.num_nodes,
            device=options.device,
            timeout_s=options.timeout_s,
            store_path=_path_of(stack, os.memfd_create("tightwire-store")),
            segment=_segment(stack, options.ranks) if transport == "shared-memory" else None,
            node_segments=tuple(
                _segment(stack, per_node) if shares_nodes and 1 < per_node < options.ranks else None
                for _ in range(options.num_nodes)
            ),
            peer_memory=transport == "peer-memory",
            network=wire.nodes if wire else (),
            throttle=wire.throttle if wire else None,
        )
        silence_s = silence_after(options.timeout_s)
        ranks = stack.enter_context(LocalRanks(options.ranks, partial(open_group, plan), silence_s=silence_s))
        having = [has for _, has in ranks.stream(has_peer_memory)] if plan.peer_memory else []
        if not all(having):
            if options.transport == "peer-memory":
                raise ValueError("--transport peer-memory cannot be had; the ranks said above why")
            transport = "process-group"
        yield ranks, {"transport": transport, "link": link_facts}


def has_peer_memory(group: Group) -> Iterator[bool]:
    """True if this rank sums through peer memory; if it cannot, the rank has logged the reason."""
    yield group.transport.fused is not None


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
    store = FileStore(plan.store_path, plan.world_size)
    group = open_process_group(
        topology,
        store=store,
        device=torch.device("cuda", rank) if plan.device == "cuda" else torch.device("cpu"),
        timeout_s=plan.timeout_s,
        interface=interface,
        segment_fd=_open(plan.segment),
        peer_memory=plan.peer_memory,
    )
    if plan.num_nodes > 1:
        segment_fd = _open(plan.node_segments[topology.node])
        group = join_nodes(group, topology, store=store, interface=interface, segment_fd=segment_fd)
    return group if plan.throttle is None else throttle_group(group, plan.throttle)


def _open_wire(options: RankOptions, stack: ExitStack) -> tuple[Wire | None, dict[str, Any] | None]:
    """The emulated link between the nodes, and facts about it for the result."""
    if options.link is None:
        return None, None
    per_node = options.ranks // options.num_nodes
    wire = stack.enter_context(open_wire(options.link, num_nodes=options.num_nodes, ranks_per_node=per_node))
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
        raise ValueError(f"--transport shared-memory cannot be had: {reason}; use --transport process-group")
    if options.transport == "auto":
        return "process-group" if reason or options.num_nodes > 1 else "shared-memory"
    return options.transport


def _segment(stack: ExitStack, world_size: int) -> str:
    return _path_of(stack, make_segment(world_size))


def _path_of(stack: ExitStack, fd: int) -> str:
    stack.callback(os.close, fd)
    return fd_path(fd)


def _open(path: str | None) -> int | None:
    return None if path is None else os.open(path, os.O_RDWR)
