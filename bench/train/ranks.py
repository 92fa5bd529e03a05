"""Starts the ranks of ``bench train`` as processes on emulated nodes and opens the connections that all arms share."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.bench.train.detached import Switch, detachable
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.comm.group.group import Group, make_loop_threads_batch, open_process_group
from tightwire.comm.group.local_ranks import LocalRanks
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.emulated_network import EmulatedNode
from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import NAMESPACES, open_wire
from tightwire.training.ranks.groups import TrainGroups, open_train_groups

_LOOPBACK = "lo"
_MEASURE = "tightwire.bench.train.measure"  # preloaded, because its import is slow and every arm starts processes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """The settings that a rank process needs to connect."""

    world_size: int
    num_nodes: int
    timeout_s: float
    store_paths: tuple[str, ...]  # for the groups of the bench, of training, and of torch
    network: tuple[EmulatedNode, ...] = ()  # by node; (): the machine's own network

    def topology(self, rank: int) -> Topology:
        return Topology(rank, self.world_size, num_nodes=self.num_nodes)

    def interface(self, rank: int) -> str | None:
        return self.network[self.topology(rank).node].interface if self.network else None


@contextmanager
def open_bench_ranks(
    options: TrainBenchOptions, *, link: str | None
) -> Iterator[tuple[LocalRanks, RankPlan, dict[str, Any] | None]]:
    """Start ranks; yields them, their plan, and facts about the link. ``link`` None: no emulated link.

    Raises:
        ValueError: this machine cannot emulate the link; the message says why.
        LocalRankError: the ranks could not join.
    """
    with ExitStack() as stack:
        wire = None
        if link is not None:
            ranks_per_node = options.ranks_per_node
            wire = stack.enter_context(
                open_wire(
                    parse_link(link), num_nodes=options.nodes, ranks_per_node=ranks_per_node, emulation=NAMESPACES
                )
            )
        plan = RankPlan(
            world_size=options.world_size,
            num_nodes=options.nodes,
            timeout_s=options.timeout_s,
            store_paths=tuple(_anonymous_file(stack) for _ in range(3)),
            network=wire.nodes if wire else (),
        )
        # A rank reports nothing during a step, which may contain several slow collectives.
        ranks = stack.enter_context(
            LocalRanks(
                options.world_size, partial(_open_world, plan), silence_s=10 * options.timeout_s, preload=[_MEASURE]
            )
        )
        facts = None if wire is None else {**asdict(wire.facts.link), "how": wire.facts.how}
        yield ranks, plan, facts


@contextmanager
def open_shared_groups(plan: RankPlan, rank: int) -> Iterator[tuple[TrainGroups, Switch]]:
    """Open training's groups, which engines do not close, and the switch that turns their messages off."""
    switch = Switch()
    groups = open_train_groups(
        plan.topology(rank),
        store=FileStore(plan.store_paths[1], plan.world_size),
        device=torch.device("cpu"),
        timeout_s=plan.timeout_s,
        interface=plan.interface(rank),
    )
    try:
        lanes = {lane: detachable(getattr(groups, lane), switch) for lane in ("gather", "reduce", "main")}
        yield _Shared(**lanes), switch
    finally:
        groups.close()


@contextmanager
def open_torch_group(plan: RankPlan, rank: int) -> Iterator[None]:
    """Open torch.distributed's default group of all ranks, with gloo over the same link."""
    os.environ["GLOO_SOCKET_IFNAME"] = plan.interface(rank) or _LOOPBACK
    store = FileStore(plan.store_paths[2], plan.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size)
    make_loop_threads_batch()  # as our own transports do
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Shared(TrainGroups):
    """Groups that stay open when an engine closes."""

    def close(self) -> None:
        pass


def _open_world(plan: RankPlan, rank: int) -> Group:
    """Open the bench's own group, which synchronizes the ranks. Runs in the rank's process."""
    topology = plan.topology(rank)
    if plan.network:
        plan.network[topology.node].enter()
    return open_process_group(
        topology,
        store=FileStore(plan.store_paths[0], plan.world_size),
        device=torch.device("cpu"),
        timeout_s=plan.timeout_s,
        interface=plan.interface(rank),
    )


def _anonymous_file(stack: ExitStack) -> str:
    fd = os.memfd_create("tightwire-store")
    stack.callback(os.close, fd)
    return f"/proc/{os.getpid()}/fd/{fd}"
