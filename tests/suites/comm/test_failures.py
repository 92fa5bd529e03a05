"""Ranks that hang, die, stop or leave: the others say which, within the deadline."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import RankFailedError, Ranks, run_in_process
from torch.distributed import FileStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import plain_names
from tightwire.comm.errors import CollectiveTimeoutError, CommError, PeerLostError, name_ranks
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.topology import Topology

pytestmark = pytest.mark.alone

OVER_EACH = pytest.mark.parametrize("sockets", [False, True], ids=["gloo", "sockets"])

BAD_RANK = 2


class Seen(NamedTuple):
    """What one rank saw of a failure."""

    error: str
    ranks: tuple[int, ...]
    message: str
    seconds: float
    doing: str | None


def _watch(group: Group, name: str, num_calls: int, num_elems: int = 288) -> Seen:
    """Call ``name`` until it fails or ``num_calls`` are done."""
    all_reduce = make_all_reduce(name, group)
    start = time.monotonic()
    try:
        for _ in range(num_calls):
            start = time.monotonic()
            all_reduce(torch.ones(num_elems))
    except CommError as error:
        return Seen(type(error).__name__, error.ranks, str(error), time.monotonic() - start, group.ledger.current())
    return Seen("none", (), "", 0.0, None)


def _bad_rank_never_comes(group: Group, name: str, absent_s: float) -> Seen | None:
    make_all_reduce(name, group)(torch.ones(288))
    if group.rank == BAD_RANK:
        time.sleep(absent_s)
        return None
    return _watch(group, name, 1)


def _bad_rank_dies_in_the_middle(group: Group, name: str, num_elems: int) -> Seen:
    if group.rank == BAD_RANK:
        # A timer strikes wherever the collectives happen to be.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return _watch(group, name, 1_000_000, num_elems)


def _bad_rank_leaves(group: Group, name: str, killed: bool) -> Seen | None:
    if group.rank == BAD_RANK:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        group.close()
        return None
    return _watch(group, name, 1)


def _bad_rank_dies_waiting(group: Group, name: str) -> Seen | None:
    if group.rank == BAD_RANK:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(0.8)
    return _watch(group, name, 1)


def _bad_rank_raises(group: Group, name: str) -> None:
    if group.rank == BAD_RANK:
        raise KeyError("a bug in the model")
    make_all_reduce(name, group)(torch.ones(3))


def _store_dies_with_its_rank(group: Group, port: int) -> Seen:
    """Open a second group whose store lives in rank 0, then kill rank 0."""
    store = TCPStore("127.0.0.1", port, is_master=group.rank == 0, timeout=timedelta(seconds=60))
    with open_process_group(Topology(group.rank, 3), store=store, device=torch.device("cpu"), timeout_s=20.0) as other:
        make_all_reduce("one-shot", other)(torch.ones(3))
        if group.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return _watch(other, "one-shot", 10)


def _again_after_failure(group: Group) -> tuple[Seen, Seen] | None:
    if group.rank == BAD_RANK:
        time.sleep(30.0)
        return None
    return _watch(group, "one-shot", 1), _watch(group, "ring", 1)


def _survivors(outcomes: dict[int, Any]) -> dict[int, Seen]:
    return {rank: seen for rank, seen in outcomes.items() if isinstance(seen, Seen)}


# One-shot is what auto takes at this size.
@pytest.mark.parametrize("name", [name for name in plain_names() if name != "one-shot"])
@OVER_EACH
def test_a_rank_that_never_comes_is_named_by_all_others(name: str, sockets: bool) -> None:
    with Ranks(4, collective_timeout_s=1.0, sockets=sockets) as ranks:
        seen = _survivors(ranks.outcomes(_bad_rank_never_comes, name, 30.0, enough=3))
        ranks.kill()

    ran = "one-shot" if name == "auto" else name
    assert sorted(seen) == [0, 1, 3]
    for rank, failure in seen.items():
        assert failure.error == "CollectiveTimeoutError", failure
        assert failure.ranks == (BAD_RANK,), f"rank {rank}: {failure.message}"
        assert "rank 2 of 4 did not arrive within 1 s" in failure.message
        assert f"all_reduce {ran} 1152 B, #2" in failure.message
        assert failure.seconds < 8
        assert failure.doing is not None and failure.doing.startswith(f"all_reduce {ran} 1152 B, #2")


def _assert_lost_at_once(seen: dict[int, Seen], rank: int) -> None:
    for failure in seen.values():
        assert (failure.error, failure.ranks) == ("PeerLostError", (rank,)), failure.message
        assert failure.seconds < 5


@pytest.mark.parametrize(
    ("name", "num_elems"), [("native", 288), ("one-shot", 500_000), ("ring", 288), ("two-shot", 500_000)]
)
@OVER_EACH
def test_a_killed_rank_is_named_long_before_the_deadline(name: str, num_elems: int, sockets: bool) -> None:
    with Ranks(4, collective_timeout_s=20.0, sockets=sockets) as ranks:
        outcomes = ranks.outcomes(_bad_rank_dies_in_the_middle, name, num_elems, timeout_s=30)

    assert isinstance(outcomes[BAD_RANK], RankFailedError)
    assert "exit code -9" in str(outcomes[BAD_RANK])
    seen = _survivors(outcomes)
    assert sorted(seen) == [0, 1, 3]
    _assert_lost_at_once(seen, BAD_RANK)


@OVER_EACH
def test_a_stopped_rank_is_named(sockets: bool) -> None:
    with Ranks(3, collective_timeout_s=1.0, sockets=sockets) as ranks:
        stopper = threading.Timer(0.3, os.kill, (ranks.processes[BAD_RANK].pid, signal.SIGSTOP))
        stopper.start()
        outcomes = ranks.outcomes(_watch, "two-shot", 1_000_000, enough=2)
        ranks.kill()

    assert sorted(outcomes) == [0, 1]
    for failure in outcomes.values():
        assert (failure.error, failure.ranks) == ("CollectiveTimeoutError", (BAD_RANK,)), failure.message


@pytest.mark.parametrize("name", ["ring", "native"])
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
@OVER_EACH
def test_a_rank_that_leaves_before_the_first_sum_is_lost_at_once(name: str, killed: bool, sockets: bool) -> None:
    with Ranks(3, collective_timeout_s=20.0, sockets=sockets) as ranks:
        seen = _survivors(ranks.outcomes(_bad_rank_leaves, name, killed, timeout_s=20))

    assert sorted(seen) == [0, 1]
    _assert_lost_at_once(seen, BAD_RANK)


@OVER_EACH
def test_a_rank_that_died_as_it_waited_in_the_first_sum_is_lost_at_once(sockets: bool) -> None:
    """Gloo connects in the first sum over sockets, and would wait for that rank until the deadline."""
    with Ranks(3, collective_timeout_s=20.0, sockets=sockets) as ranks:
        seen = _survivors(ranks.outcomes(_bad_rank_dies_waiting, "native", timeout_s=30))

    assert sorted(seen) == [0, 1]
    _assert_lost_at_once(seen, BAD_RANK)


def test_the_store_may_die_with_its_rank() -> None:
    port = _free_port()
    with Ranks(3, collective_timeout_s=20.0) as ranks:
        seen = _survivors(ranks.outcomes(_store_dies_with_its_rank, port, timeout_s=30))

    assert sorted(seen) == [1, 2]
    # One may see the other leave before it misses rank 0, and no store is left that says why the other left.
    blamed = {rank: failure.ranks for rank, failure in seen.items()}
    assert blamed in ({1: (0,), 2: (0,)}, {1: (2,), 2: (0,)}, {1: (0,), 2: (1,)})
    for rank, failure in seen.items():
        _assert_lost_at_once({rank: failure}, *blamed[rank])


def test_a_failed_group_fails_again_at_once_for_the_same_reason() -> None:
    with Ranks(3, collective_timeout_s=0.5) as ranks:
        first, second = ranks.outcomes(_again_after_failure, enough=2)[0]
        ranks.kill()
    assert second.error == first.error and second.ranks == first.ranks
    assert second.seconds < 0.3


def test_a_rank_that_does_not_join_is_named(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(CollectiveTimeoutError, match="ranks 1 and 2 of 3 did not") as caught:
        open_process_group(Topology(0, 3), store=store, device=torch.device("cpu"), timeout_s=0.3)
    assert caught.value.ranks == (1, 2)


class TestInProcess:
    def test_a_rank_that_never_comes_is_named(self) -> None:
        seen = run_in_process(4, _bad_rank_never_comes, "two-shot", 0.6, timeout_s=0.3)
        for failure in (seen[0], seen[1], seen[3]):
            assert (failure.error, failure.ranks) == ("CollectiveTimeoutError", (BAD_RANK,)), failure.message
            assert "all_reduce two-shot 1152 B, #2" in failure.message
            assert failure.seconds < 0.6

    def test_a_rank_that_raises_frees_the_others_and_is_what_is_reported(self) -> None:
        start = time.monotonic()
        with pytest.raises(KeyError, match="a bug in the model"):
            run_in_process(4, _bad_rank_raises, "ring", timeout_s=20.0)
        assert time.monotonic() - start < 5

    def test_a_closed_group_is_lost(self) -> None:
        seen = run_in_process(3, _bad_rank_leaves, "native", False, timeout_s=20.0)
        assert (seen[0].error, seen[0].ranks) == (PeerLostError.__name__, (BAD_RANK,))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], "an unknown rank"), ([1], "rank 1"), ([2, 0], "ranks 0 and 2"), ([1, 2, 3], "ranks 1, 2 and 3")],
)
def test_ranks_read_well_in_messages(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def _free_port() -> int:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store.port
