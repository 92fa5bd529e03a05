"""Partitioned layers among real processes: the same bits and bytes; ranks that die or hang."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import Ranks
from helpers.model.partition_bodies import Work, World, build, compute_as_process, open_peers, open_replica, walk
from helpers.model.partition_checks import NUM_LAYERS, PROMPTS, check_bytes, check_logits, plan_for
from tiny import make_tiny

from tightwire.bench.stream.order import OrderCheck
from tightwire.comm.errors import CommError
from tightwire.comm.group.group import Group
from tightwire.comm.transport.segment import make_segment
from tightwire.model.weights.streamed import StreamedWeights

pytestmark = pytest.mark.alone

BAD_RANK = 2


class Seen(NamedTuple):
    """What one rank saw of a failure."""

    error: str
    ranks: tuple[int, ...]
    message: str


@contextmanager
def joined(world: World, folder: Path, *, shared_memory: bool) -> Iterator[World]:
    """``world`` with a store, and with memory that the ranks of each node and shard share."""
    count = world.num_nodes * world.tp if shared_memory else 0
    fds = [make_segment(world.dp // world.num_nodes) for _ in range(count)]
    try:
        segments = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in fds)
        yield replace(world, store=str(folder / "store"), segments=segments)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.fixture(name="four_ranks", scope="module")
def fixture_four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("world", "codec", "shared_memory"),
    [
        (World(1, 2), "int8", True),
        (World(1, 3), "none", True),
        (World(2, 2), "int4", False),
        (World(1, 4, num_nodes=2), "int4", False),
    ],
    ids=str,
)
def test_processes_give_the_logits_and_bytes_of_threads(
    world: World, codec: str, shared_memory: bool, four_ranks: Ranks, tmp_path: Path
) -> None:
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    work = Work(str(location), plan_for(world, codec), PROMPTS[: world.dp])
    with joined(world, tmp_path, shared_memory=shared_memory) as place:
        done = four_ranks.run(compute_as_process, place, work)[: world.num_ranks]
    check_logits(world, work, done)
    check_bytes(world, work, done)


def _watch(group: Group, world: World, work: Work, end: str) -> Seen:
    """Passes until a rank is missed. ``BAD_RANK`` ends itself in the midst of one."""
    peers = open_peers(world, group.rank)
    runner = build(open_replica(world, group.rank), peers, work)
    try:
        walk(runner)
        if group.rank == BAD_RANK:
            runner.weights.layer(0)
            runner.weights.release(0)
            if end == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        for _ in range(1_000_000):
            walk(runner)
    except CommError as error:
        weights = runner.weights
        assert isinstance(weights, StreamedWeights)
        OrderCheck().check(weights.pool.events)
        return Seen(type(error).__name__, error.ranks, str(error))
    finally:
        runner.close()
    return Seen("none", (), "")


@pytest.mark.parametrize(("end", "shared_memory"), [("dies", True), ("dies", False), ("hangs", True), ("hangs", False)])
def test_a_pass_names_the_missing_rank(end: str, shared_memory: bool, tmp_path: Path) -> None:
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    world = World(1, 3, timeout_s=1.5)
    work = Work(str(location), plan_for(world), PROMPTS)
    with joined(world, tmp_path, shared_memory=shared_memory) as place, Ranks(3) as ranks:
        outcomes = ranks.outcomes(_watch, place, work, end, enough=2 if end == "hangs" else 3, timeout_s=30)
        ranks.kill()
    for rank in (0, 1):
        seen = outcomes[rank]
        assert isinstance(seen, Seen), seen
        assert seen.ranks == (BAD_RANK,), seen
        assert seen.error == ("CollectiveTimeoutError" if end == "hangs" else "PeerLostError")
        assert f"rank {rank} lost rank 2 of 3 among the ranks of its node with the same weights" in seen.message


def _close_in_a_gather(group: Group, world: World, work: Work) -> bool:
    """Rank 0 makes a pass that the other does not, and closes while its next layers are under way."""
    peers = open_peers(world, group.rank)
    runner = build(open_replica(world, group.rank), peers, work)
    weights = runner.weights
    assert isinstance(weights, StreamedWeights)
    peers.await_all()
    if group.rank == 0:
        for layer in range(2):
            weights.layer(layer)
            weights.release(layer)
        while all(buffer.state != "filling" for buffer in weights.pool.buffers):
            time.sleep(0.001)
        weights.close()
    peers.await_all()
    weights.close()
    return weights.fetcher._threads[0].is_alive()


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared-memory"])
def test_closing_does_not_wait_for_others(shared_memory: bool, tmp_path: Path) -> None:
    """Long before the collective's deadline; over gloo the thread that waits there stays until the other side is closed."""
    location = make_tiny(tmp_path / "m", num_hidden_layers=NUM_LAYERS)
    world = World(1, 2, timeout_s=120.0)
    work = Work(str(location), plan_for(world), PROMPTS[:2])
    with joined(world, tmp_path, shared_memory=shared_memory) as place, Ranks(2) as ranks:
        alive = ranks.run(_close_in_a_gather, place, work, timeout_s=60)
        ranks.kill()  # a thread that waits would keep its process for seconds
    assert not alive[1]
    assert not shared_memory or not alive[0]
