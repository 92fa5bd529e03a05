"""What every process transport says when ranks do not call alike, and what a failure tells of each rank's last call."""

import os
import signal
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
from harness import Ranks

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.errors import CollectiveMismatchError, CollectiveTimeoutError, CommError, PeerLostError
from tightwire.comm.group.group import Group
from tightwire.comm.transport.shared_memory import SharedMemoryTransport

pytestmark = pytest.mark.alone

ODD_RANK = 1
TIMEOUT_S = 0.8
OVER = {"gloo": False, "shared-memory": True}


class Seen(NamedTuple):
    """How a rank's last call ended."""

    error: type[CommError]
    ranks: tuple[int, ...]
    message: str


def _call(group: Group, name: str, x: torch.Tensor) -> Seen | None:
    try:
        make_all_reduce(name, group)(x)
    except CommError as error:
        return Seen(type(error), error.ranks, str(error))
    return None


def _unlike(group: Group, name: str, num_elems: int, odd_name: str, odd_num_elems: int) -> Seen | None:
    make_all_reduce(name, group)(torch.ones(8))
    if group.rank == ODD_RANK:
        return _call(group, odd_name, torch.ones(odd_num_elems))
    return _call(group, name, torch.ones(num_elems))


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("name", ["one-shot", "two-shot", "ring", "flash:none,none", "flash-int8"])
def test_another_shape_is_an_error_on_every_rank_that_says_whose(over: str, name: str) -> None:
    with Ranks(3, shared_memory=OVER[over], collective_timeout_s=TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(_unlike, name, 300, name, 290, timeout_s=20)
        ranks.kill()

    assert sorted(outcomes) == [0, 1, 2]
    for seen in outcomes.values():
        assert seen.error is CollectiveMismatchError, seen
        assert seen.ranks == (ODD_RANK,), seen.message
        assert "different collectives" in seen.message
        for rank, num_bytes in enumerate((1200, 1160, 1200)):
            assert any(
                f"rank {rank}{join} all_reduce {name} {num_bytes} B, #2" in seen.message for join in (":", " in")
            ), seen.message


@pytest.mark.parametrize(
    ("odd_name", "odd_num_elems"), [("two-shot", 300), ("flash:none,none", 300), ("ring", 300), ("one-shot", 200_000)]
)
def test_another_algorithm_or_chunk_count_is_seen_at_once(odd_name: str, odd_num_elems: int) -> None:
    with Ranks(3, shared_memory=True, collective_timeout_s=20.0) as ranks:
        outcomes = ranks.outcomes(_unlike, "one-shot", 300, odd_name, odd_num_elems, timeout_s=30)
        ranks.kill()

    for seen in outcomes.values():
        assert (seen.error, seen.ranks) == (CollectiveMismatchError, (ODD_RANK,)), seen
        assert f"rank 1: all_reduce {odd_name}" in seen.message


def _dtypes(group: Group) -> Seen | None:
    """As many bytes on both ranks: only what is called tells them apart."""
    return _call(group, "one-shot", torch.ones(8, dtype=(torch.bfloat16, torch.float16)[group.rank]))


def test_another_dtype_is_seen_and_told() -> None:
    with Ranks(2, shared_memory=True) as ranks:
        outcomes = ranks.outcomes(_dtypes, timeout_s=20)

    for seen in outcomes.values():
        assert (seen.error, seen.ranks) == (CollectiveMismatchError, (0, 1)), "of two, neither is the odd one"
        assert "rank 0: all_reduce one-shot 16 B, #1 (one-shot of 8 bfloat16)" in seen.message.replace(", gave up", "")
        assert "one-shot of 8 float16" in seen.message


def _until_rank_one_stops(group: Group, stop: signal.Signals) -> Seen | None:
    make_all_reduce("two-shot", group)(torch.ones(16))
    if group.rank == ODD_RANK:
        _wait_for_the_others(group)
        os.kill(os.getpid(), stop)
    return _call(group, "one-shot", torch.ones(300))


def _wait_for_the_others(group: Group) -> None:
    """Until the board shows them in the next collective; gloo has no board, and tells when each gives up."""
    transport = group.transport
    if isinstance(transport, SharedMemoryTransport):
        while transport.board.last_collectives().count("#2") < group.world_size - 1:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("over", "stop", "error"),
    [
        ("shared-memory", signal.SIGSTOP, CollectiveTimeoutError),
        ("shared-memory", signal.SIGKILL, PeerLostError),
        ("gloo", signal.SIGSTOP, CollectiveTimeoutError),
    ],
)
def test_a_failure_lists_every_ranks_last_collective(over: str, stop: signal.Signals, error: type[CommError]) -> None:
    """Also that of a rank which cannot tell any more; over gloo it is said that nothing was heard of it."""
    died = stop == signal.SIGKILL  # which is seen long before the deadline
    with Ranks(3, shared_memory=OVER[over], collective_timeout_s=30.0 if died else TIMEOUT_S) as ranks:
        outcomes = ranks.outcomes(_until_rank_one_stops, stop, enough=2 + died, timeout_s=25)
        ranks.kill()

    seen = [outcome for outcome in outcomes.values() if isinstance(outcome, Seen)]
    assert len(seen) == 2, outcomes
    for failure in seen:
        assert (failure.error, failure.ranks) == (error, (ODD_RANK,)), failure.message
        if over == "gloo":
            assert "rank 1: no report" in failure.message
        else:
            assert f"rank 1: all_reduce two-shot 64 B, #1{', died' if died else ''};" in failure.message
            assert "rank 2: all_reduce one-shot 1200 B, #2" in failure.message


def _native_after_shared(group: Group) -> Seen | None:
    make_all_reduce("one-shot", group)(torch.ones(16))
    if group.rank == ODD_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    failed = _call(group, "native", torch.ones(300))
    assert _call(group, "one-shot", torch.ones(3)) is not None, "the group is of no use any more"
    return failed


def test_the_librarys_failure_lists_last_collectives_too() -> None:
    with Ranks(3, shared_memory=True, collective_timeout_s=10.0) as ranks:
        outcomes = ranks.outcomes(_native_after_shared, timeout_s=30)

    for rank in (0, 2):
        assert (outcomes[rank].error, outcomes[rank].ranks) == (PeerLostError, (ODD_RANK,))
        assert "rank 1: all_reduce one-shot 64 B, #1, died" in outcomes[rank].message


def _calls_until_it_fails(group: Group, name: str) -> Seen | None:
    if group.rank == ODD_RANK:
        # Strikes wherever the kernels happen to be.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while (seen := _call(group, name, torch.ones(500_000))) is None:
        pass
    return seen


@pytest.mark.parametrize("name", ["one-shot", "two-shot"])
def test_a_rank_killed_within_a_kernel_is_named_long_before_the_deadline(name: str) -> None:
    with Ranks(3, shared_memory=True, collective_timeout_s=60.0) as ranks:
        outcomes: dict[int, Any] = ranks.outcomes(_calls_until_it_fails, name, timeout_s=30)

    for rank in (0, 2):
        assert (outcomes[rank].error, outcomes[rank].ranks) == (PeerLostError, (ODD_RANK,)), outcomes[rank]
