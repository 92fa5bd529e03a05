"""Ranks on several nodes: who is in which smaller group, what is refused, and who is blamed when a rank goes."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness import Ranks, run_in_process, run_ranks
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.collectives.all_gather import all_gather
from tightwire.comm.errors import CommError, PeerLostError
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import PartitionPlace, join_nodes, ranks_of
from tightwire.comm.group.topology import Topology

pytestmark = pytest.mark.alone

BAD_RANK = 3


class Seen(NamedTuple):
    """What one rank saw of a failure."""

    error: str
    ranks: tuple[int, ...]
    message: str


def _members(group: Group) -> tuple[list[int], list[int]]:
    """The ranks of the whole group that this rank meets inside its node, and across."""
    assert group.nodes is not None
    own = torch.tensor([group.rank])
    inside, across = ([int(rank) for rank in all_gather(g, own)] for g in (group.nodes.inside, group.nodes.across))
    assert inside == ranks_of(group.nodes, group.nodes.inside)
    assert across == ranks_of(group.nodes, group.nodes.across)
    return inside, across


def _transports(group: Group) -> tuple[str, str]:
    assert group.nodes is not None
    return type(group.nodes.inside.transport).__name__, type(group.nodes.across.transport).__name__


def _counts(group: Group) -> list[tuple[str, int]]:
    """Ops and bytes in the one ledger of a collective in each group."""
    assert group.nodes is not None
    sent_before = group.bytes_sent
    for each in (group, group.nodes.inside, group.nodes.across):
        all_gather(each, torch.zeros(each.world_size * 100), phase="counted")
    [count] = [count for count in group.ledger.counters.counts() if count.phase == "counted"]
    assert count.bytes_sent == group.bytes_sent - sent_before
    return [(count.op, count.bytes_sent)]


def _joins_otherwise(group: Group, path: str) -> str:
    """Rank 1 thinks that there is one node."""
    topology = Topology(group.rank, group.world_size, num_nodes=1 if group.rank == 1 else 2)
    try:
        join_nodes(group, topology, store=FileStore(path, group.world_size))
    except ValueError as error:
        return str(error)
    return "joined"


def _joins_one_node(group: Group, path: str) -> bool:
    return join_nodes(group, Topology(group.rank, 2), store=FileStore(path, 2)) is group


def _watch(group: Group, end: str) -> Seen | None:
    """AllReduces until a rank is lost. ``BAD_RANK`` ends itself in between."""
    all_reduce = make_all_reduce("hierarchical", group)
    all_reduce(torch.ones(100))
    if group.rank == BAD_RANK:
        if end == "leaves":
            group.close()
            return None
        if end == "hangs":
            time.sleep(20)
            return None
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        for _ in range(1_000_000):
            all_reduce(torch.ones(100))
    except CommError as error:
        return Seen(type(error).__name__, error.ranks, str(error))
    return Seen("none", (), "")


def _unused_after_close(group: Group) -> bool:
    assert group.nodes is not None
    group.close()
    failed = 0
    for each in (group.nodes.inside, group.nodes.across):
        try:
            each.transport.barrier()
        except CommError:
            failed += 1
    return failed == 2


@pytest.mark.parametrize("shape", [(4, 2), (6, 3), (6, 2), (3, 3)])
def test_each_rank_is_in_two_smaller_groups(shape: tuple[int, int]) -> None:
    world_size, num_nodes = shape
    per_node = world_size // num_nodes
    nodes = [list(range(start, start + per_node)) for start in range(0, world_size, per_node)]
    for rank, (inside, across) in enumerate(run_in_process(world_size, _members, num_nodes=num_nodes)):
        assert inside == nodes[rank // per_node]
        assert across == [node[rank % per_node] for node in nodes]


def test_processes_join_alike() -> None:
    with Ranks(4, shared_memory=True, num_nodes=2) as ranks:
        assert ranks.run(_members) == [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
        assert ranks.run(_transports) == [("SharedMemoryTransport", "GlooTransport")] * 4
        # (W-1) times 100 W float32 in each of the three groups.
        assert ranks.run(_counts) == [[("all_gather", 4 * 100 * (3 * 4 + 2 + 2))]] * 4
        assert ranks.run(_unused_after_close) == [True] * 4


def test_one_node_needs_no_smaller_groups(tmp_path: Path) -> None:
    assert run_in_process(3, _has_nodes) == [False] * 3
    assert run_ranks(2, _joins_one_node, str(tmp_path / "store")) == [True, True]


def _has_nodes(group: Group) -> bool:
    return group.nodes is not None


def test_unlike_numbers_of_nodes_are_refused_everywhere(tmp_path: Path) -> None:
    for said in run_ranks(2, _joins_otherwise, str(tmp_path / "store")):
        assert "have different numbers of nodes: [2, 1]" in said


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared-memory"])
@pytest.mark.parametrize("end", ["dies", "leaves", "hangs"])
def test_all_name_the_rank_that_is_gone_not_those_who_miss_it(end: str, shared_memory: bool) -> None:
    """Rank 0 meets rank 3 in no smaller group: it sees only that ranks 1 or 2 have failed."""
    with Ranks(4, collective_timeout_s=1.5, shared_memory=shared_memory, num_nodes=2) as ranks:
        outcomes = ranks.outcomes(_watch, end, enough=3 if end == "hangs" else 4, timeout_s=30)
        seen = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Seen)}
        ranks.kill()
    assert set(seen) >= {0, 1, 2}
    for rank in (0, 1, 2):
        assert seen[rank].ranks == (BAD_RANK,), f"rank {rank}: {seen[rank]}"
        assert f"rank {rank} lost rank 3 of 4" in seen[rank].message


def place(tp: int, rank: int, world_size: int, num_nodes: int) -> PartitionPlace:
    return PartitionPlace(tp, Topology(rank, world_size, num_nodes=num_nodes))


@pytest.mark.parametrize(
    ("tp", "world_size", "num_nodes"), [(1, 2, 1), (2, 4, 1), (2, 8, 2), (1, 6, 3), (3, 12, 2), (1, 4, 4)]
)
def test_each_rank_shares_with_those_of_its_shard(tp: int, world_size: int, num_nodes: int) -> None:
    places = [place(tp, rank, world_size, num_nodes) for rank in range(world_size)]
    for rank, at in enumerate(places):
        assert len(at.inside) == at.per_node == world_size // tp // num_nodes
        assert at.inside[at.place] == rank
        assert {places[other].topology.node for other in at.inside} == {at.topology.node}
        assert {places[other].shard for other in at.inside} == {at.shard}


def test_replicas_that_nodes_would_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="each node's 3 ranks must be whole replicas"):
        place(2, 0, 6, 2)
    with pytest.raises(ValueError, match="5 ranks are not whole replicas of --tp 2"):
        place(2, 0, 5, 1)


def test_the_missing_rank_is_named_as_the_world_numbers_it() -> None:
    error = place(2, 5, 8, 2).numbered(PeerLostError("rank 0 of 2 lost rank 1", [1]))
    assert isinstance(error, PeerLostError) and error.ranks == (7,)
    assert str(error).startswith(
        "rank 5 lost rank 7 of 8 among the ranks of its node with the same weights; from here on ranks 5, 7"
    )
