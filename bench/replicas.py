"""Starts replicas on this machine: tp x dp rank processes, each with the group of its replica and its partition peers.

    with open_replicas(tp=1, dp=2) as (ranks, plan):
        for rank, event in ranks.stream(measure, plan):        # on every rank: measure(world, plan) is a generator

    def measure(world, plan):
        with join_replica(plan, world) as (replica, peers):
            runner = build_runner(..., RankGroups(replica, peers=peers), ...)

``world`` has all ranks, for steps that begin together. Partitioned weights arrive only while all ranks run the same passes.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.local_ranks import LocalRanks, fd_path, silence_after
from tightwire.comm.group.partition_groups import PartitionPeers, PartitionPlace, join_partition
from tightwire.comm.group.topology import Topology
from tightwire.comm.transport.segment import make_segment, why_unusable


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlan:
    """What a rank needs to join. Segments are paths, () if memory cannot be shared: gloo then carries everything."""

    tp: int
    dp: int
    timeout_s: float
    store_paths: tuple[str, ...]  # the world, then each replica, then the peers
    world_segment: str | None = None
    replica_segments: tuple[str, ...] = ()  # by replica
    peer_segments: tuple[str, ...] = ()  # by shard

    @property
    def world_size(self) -> int:
        return self.tp * self.dp


@contextmanager
def open_replicas(
    *, tp: int, dp: int, timeout_s: float = 60.0, shared_memory: bool | None = None
) -> Iterator[tuple[LocalRanks, ReplicaPlan]]:
    """The running ranks.

    Args:
        shared_memory: False: gloo. Default: shared memory where it is available.
    Raises:
        LocalRankError: the ranks could not join.
    """
    shares = why_unusable() is None if shared_memory is None else shared_memory
    with ExitStack() as stack:

        def path_of(fd: int) -> str:
            stack.callback(os.close, fd)
            return fd_path(fd)

        def segments(count: int, num_ranks: int) -> tuple[str, ...]:
            return tuple(path_of(make_segment(num_ranks)) for _ in range(count)) if shares and num_ranks > 1 else ()

        plan = ReplicaPlan(
            tp=tp,
            dp=dp,
            timeout_s=timeout_s,
            store_paths=tuple(path_of(os.memfd_create("tightwire-store")) for _ in range(dp + 2)),
            world_segment=next(iter(segments(1, tp * dp)), None),
            replica_segments=segments(dp, tp),
            peer_segments=segments(tp, dp),
        )
        silence_s = silence_after(timeout_s)
        yield stack.enter_context(LocalRanks(tp * dp, partial(_open_world, plan), silence_s=silence_s)), plan


@contextmanager
def join_replica(plan: ReplicaPlan, world: Group) -> Iterator[tuple[Group, PartitionPeers]]:
    """The group of this rank's replica, and the ranks that have the same shard."""
    replica, shard = divmod(world.rank, plan.tp)
    own = _open(
        plan,
        Topology(shard, plan.tp),
        plan.store_paths[1 + replica],
        plan.replica_segments[replica] if plan.replica_segments else None,
    )
    peers = join_partition(
        PartitionPlace(plan.tp, Topology(world.rank, plan.world_size)),
        store=FileStore(plan.store_paths[-1], plan.world_size),
        device=torch.device("cpu"),
        timeout_s=plan.timeout_s,
        segment_fd=os.open(plan.peer_segments[shard], os.O_RDWR) if plan.peer_segments else None,
    )
    try:
        yield own, peers
    finally:
        peers.close()
        own.close()


def _open_world(plan: ReplicaPlan, rank: int) -> Group:
    return _open(plan, Topology(rank, plan.world_size), plan.store_paths[0], plan.world_segment)


def _open(plan: ReplicaPlan, topology: Topology, store_path: str, segment: str | None) -> Group:
    return open_process_group(
        topology,
        store=FileStore(store_path, topology.world_size),
        device=torch.device("cpu"),
        timeout_s=plan.timeout_s,
        segment_fd=None if segment is None else os.open(segment, os.O_RDWR),
    )
