"""Shared memory between processes: long messages in chunks, thousands of calls, and ranks that fail."""

import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankFailedError, Ranks, run_ranks
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.errors import CollectiveTimeoutError, CommError, PeerLostError, renumbered
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.transport.segment import make_segment, why_unusable
from tightwire.comm.transport.shared_memory import SharedMemoryTransport

pytestmark = pytest.mark.alone

_CHUNK_BYTES = 4096


def _sums_of_many_sizes(group: Group, num_calls: int) -> None:
    """Alternating sizes, up to many chunks; every answer checked."""
    arms = [make_all_reduce(name, group) for name in ("one-shot", "two-shot", "ring", "auto")]
    total = sum(range(1, group.world_size + 1))
    for call in range(num_calls):
        num_elems = (1, 288, 4097, 7, 1025)[call % 5] + call % 3
        base = torch.arange(num_elems, dtype=torch.float32) % 61
        result = arms[call % len(arms)](base * (group.rank + 1))
        assert torch.equal(result, base * total), f"call {call}, {num_elems} elements"


@pytest.mark.parametrize("world_size", [2, 4])
def test_alternating_sizes_in_small_chunks_never_mix(world_size: int) -> None:
    with Ranks(world_size, shared_memory=True, chunk_bytes=_CHUNK_BYTES) as ranks:
        ranks.run(_sums_of_many_sizes, 4000, timeout_s=100)


def _unlike_sizes(group: Group) -> None:
    """Gathers and shifts whose ranks differ by more than a chunk."""
    sizes = [_CHUNK_BYTES * 3 * rank + 5 for rank in range(group.world_size)]
    mine = torch.full((sizes[group.rank],), group.rank, dtype=torch.uint8)
    for _ in range(20):
        gathered = group.transport.gather(mine, sizes)
        assert [(len(buf), int(buf[-1])) for buf in gathered] == [(size, rank) for rank, size in enumerate(sizes)]
        left = (group.rank - 1) % group.world_size
        shifted = group.transport.shift(mine, sizes[left])
        assert len(shifted) == sizes[left] and bool((shifted == left).all())


def test_ranks_may_send_unlike_numbers_of_chunks() -> None:
    with Ranks(3, shared_memory=True, chunk_bytes=_CHUNK_BYTES) as ranks:
        ranks.run(_unlike_sizes)


def _native_is_the_librarys(group: Group) -> int:
    before = group.transport.bytes_sent
    assert torch.equal(make_all_reduce("native", group)(torch.ones(10)), torch.full((10,), 2.0))
    return group.transport.bytes_sent - before


def test_native_still_goes_through_the_library_and_is_counted() -> None:
    assert run_ranks(2, _native_is_the_librarys, shared_memory=True) == [40, 40]


def _until_it_fails(
    group: Group, bad_rank: int, fault: str, late_s: float = 0.0
) -> tuple[type[CommError], tuple[int, ...], str, float]:
    """``late_s``: how long after the others the last rank comes."""
    all_reduce = make_all_reduce("one-shot", group)
    all_reduce(torch.ones(8))
    if group.rank == group.world_size - 1:
        time.sleep(late_s)
    if group.rank == bad_rank:
        if fault == "close":
            group.close()
            time.sleep(60)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])
    start = time.monotonic()
    try:
        all_reduce(torch.ones(8))
    except CommError as error:
        with pytest.raises(type(error)):
            all_reduce(torch.ones(8))  # a failed group stays failed
        return type(error), error.ranks, str(error), time.monotonic() - start
    raise AssertionError("the rank at fault was not missed")


@pytest.mark.parametrize("late_s", [0.0, 0.5])
@pytest.mark.parametrize(
    ("fault", "error", "timeout_s"),
    [("kill", PeerLostError, 30.0), ("close", PeerLostError, 30.0), ("stop", CollectiveTimeoutError, 1.2)],
)
def test_a_failed_rank_alone_is_named_in_time(
    fault: str, error: type[CommError], timeout_s: float, late_s: float
) -> None:
    """A rank that is merely late is not blamed, nor the first to notice by the second."""
    with Ranks(3, shared_memory=True, collective_timeout_s=timeout_s) as ranks:
        survivors = 3 if fault == "kill" else 2  # a killed rank is an outcome too
        outcomes = ranks.outcomes(_until_it_fails, 1, fault, late_s, enough=survivors, timeout_s=20)
        ranks.kill()

    seen = [outcome for outcome in outcomes.values() if not isinstance(outcome, RankFailedError)]
    assert len(seen) == 2, outcomes
    for raised, at_fault, message, seconds in seen:
        assert raised is error, message
        assert at_fault == (1,), message
        assert "rank 1 of 3" in message and "all_reduce one-shot 32 B" in message
        assert seconds < 10


def test_nothing_is_left_by_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    with Ranks(2, shared_memory=True) as ranks:
        ranks.run(_sums_of_many_sizes, 10)
        during = set(Path("/dev/shm").iterdir())
    assert during == before


def _random_calls(group: Group, seed: int, num_calls: int) -> None:
    """Every call of the seam in a random order, with sizes around one and several chunks, and now and then a late rank."""
    rng, transport, rank, num_ranks = random.Random(seed), group.transport, group.rank, group.world_size

    def message(call: int, sender: int, receiver: int, num_bytes: int) -> torch.Tensor:
        return ((torch.arange(num_bytes) * 7 + sender * 31 + receiver * 101 + call) % 251).to(torch.uint8)

    for call in range(num_calls):
        method = rng.choice(["exchange", "gather", "shift", "barrier"])
        sizes = [rng.choice([0, 1, 63, 700, 704, 705, 5000]) for _ in range(num_ranks)]
        if rng.random() < 0.01 and rank == call % num_ranks:
            time.sleep(0.001)
        if method == "exchange":
            received = transport.exchange([message(call, rank, peer, sizes[peer]) for peer in range(num_ranks)])
            wanted = [message(call, peer, rank, sizes[rank]) for peer in range(num_ranks)]
        elif method == "gather":
            received = transport.gather(message(call, rank, 0, sizes[rank]), sizes)
            wanted = [message(call, peer, 0, sizes[peer]) for peer in range(num_ranks)]
        elif method == "shift":
            left = (rank - 1) % num_ranks
            received = [transport.shift(message(call, rank, 0, sizes[rank]), sizes[left])]
            wanted = [message(call, left, 0, sizes[left])]
        else:
            transport.barrier()
            continue
        assert all(map(torch.equal, received, wanted)), f"call {call}, {method} of {sizes}"


@pytest.mark.parametrize(("world_size", "num_calls"), [(3, 600), (7, 120)])
def test_random_calls_never_mix_even_with_more_ranks_than_cores(world_size: int, num_calls: int) -> None:
    with Ranks(world_size, shared_memory=True, chunk_bytes=704) as ranks:
        ranks.run(_random_calls, world_size, num_calls, timeout_s=100)


def _library(rank: int, world_size: int) -> Any:
    stage = partial(renumbered, ranks=(2, 3), where="in stage 1", rank=2 + rank, world_size=4)
    given = {"timeout_s": 5, "ledger": Ledger(), "barrier": lambda: None, "close": lambda: None, "numbered": stage}
    return SimpleNamespace(rank=rank, world_size=world_size, **given)


def test_errors_of_a_stage_name_the_ranks_as_the_server_numbers_them() -> None:
    fd = make_segment(2)
    first, second = (SharedMemoryTransport(fd, _library(rank, 2)) for rank in range(2))
    second.close()
    said = "rank 2 lost rank 3 of 4 in stage 1; from here on ranks 2, 3 are numbered from 0: rank 0 lost rank 1 of 2"
    with pytest.raises(PeerLostError, match=said) as caught:
        first.gather(torch.ones(8, dtype=torch.uint8))
    assert caught.value.ranks == (3,)
    os.close(fd)


def test_a_segment_carries_one_group() -> None:
    fd = make_segment(1)
    library = _library(0, 1)
    SharedMemoryTransport(fd, library)
    with pytest.raises(ValueError, match="already has a rank 0"):
        SharedMemoryTransport(fd, library)
    os.close(fd)


def test_a_sandbox_without_anonymous_files_has_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert why_unusable() == "an anonymous shared file cannot be made here (memfd_create: Operation not permitted)"


NAMES = (
    *("one-shot", "two-shot", "flash-int8", "flash:int4-g32,int8-had", "flash:none,int5-sym", "flash:none,none"),
    *("flash:int4-g64-had-ef,int4-g64-had-ef", "flash:int4-ef,none"),
)
LENGTHS = (1, 63, 1025, 150_001)  # the last: several chunks, in any dtype
DTYPES = (torch.float32, torch.bfloat16)


class _Messages:
    """A transport without its fused AllReduces."""

    fused = None

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _same_as_over_messages(group: Group) -> None:
    messages: Any = _Messages(group.transport)
    for name in NAMES:
        fused, plain = make_all_reduce(name, group), make_all_reduce(name, replace(group, transport=messages))
        feedbacks = Feedback(), Feedback()
        for num_elems in LENGTHS:
            for dtype in DTYPES:
                generator = torch.Generator().manual_seed(num_elems * group.world_size + group.rank)
                x = torch.randn(num_elems, generator=generator).mul(3).to(dtype)
                sent = [group.transport.bytes_sent]
                got = fused(x, feedback=feedbacks[0])
                sent.append(group.transport.bytes_sent)
                want = plain(x, feedback=feedbacks[1])
                sent.append(group.transport.bytes_sent)
                case = f"{name} {num_elems} {dtype}"
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), case
                assert sent[1] - sent[0] == sent[2] - sent[1] == fused.wire_bytes(num_elems, x.element_size()), case


def test_the_bits_and_bytes_of_the_algorithm_over_messages() -> None:
    run_ranks(3, _same_as_over_messages, shared_memory=True)


def _two_groups(group: Group, port: int) -> None:
    """A second group of the same ranks over a segment of its own, its calls between those of the first."""
    fd = make_segment(group.world_size) if group.rank == 0 else -1
    where = torch.tensor([os.getpid(), fd]).view(torch.uint8)
    pid, fd = group.transport.gather(where)[0].view(torch.int64).tolist()
    store = TCPStore("127.0.0.1", port, is_master=False)
    with open_process_group(
        Topology(group.rank, group.world_size),
        store=store,
        device=torch.device("cpu"),
        timeout_s=group.timeout_s,
        name="second",
        segment_fd=os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR),
    ) as second:
        arms = [make_all_reduce("one-shot", group), make_all_reduce("two-shot", second)]
        total = sum(range(1, group.world_size + 1))
        for call in range(60):
            arm = arms[call % 3 % 2]
            assert arm(torch.full((288,), float((group.rank + 1) * call)))[0] == total * call
    for _ in range(10):  # the first goes on without the second
        assert arms[0](torch.ones(3))[0] == group.world_size
    with pytest.raises(CommError, match="this group is closed"):
        arms[1](torch.ones(3))


def test_groups_do_not_meet() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(3, _two_groups, store.port, shared_memory=True)


def _too_small_for_flash(group: Group) -> None:
    with pytest.raises(ValueError, match="needs 512 bytes in a buffer of the segment, which has 192"):
        make_all_reduce("flash:none,int8", group)(torch.ones(1000, dtype=torch.float16))


def test_a_segment_too_small_for_flash_is_refused() -> None:
    with Ranks(2, shared_memory=True, chunk_bytes=192) as ranks:
        ranks.run(_too_small_for_flash)
