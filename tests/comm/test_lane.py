"""Collectives on a thread beside the caller's: their order, their failures, and what of their time is waited for."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from harness import run_in_process
from torch import Tensor

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.lane import Lane
from tightwire.comm.ledger.ledger import Ledger


def _sums(group: Group) -> list[Tensor]:
    all_reduce, lane = make_all_reduce("two-shot", group), Lane("sums", group.device, ledger=group.ledger)
    flights = [lane.start(lambda n=n: all_reduce(torch.full((8,), float(n + group.rank)))) for n in range(5)]
    return [flight.wait() for flight in flights]


def test_collectives_run_in_the_order_they_were_started() -> None:
    for sums in run_in_process(2, _sums):
        assert [total.tolist() for total in sums] == [[2.0 * n + 1] * 8 for n in range(5)]


def _collective(ledger: Ledger, seconds: float) -> Tensor:
    ledger.begin("all_reduce", "two-shot", 8)
    with ledger.coding:
        time.sleep(seconds / 2)
    time.sleep(seconds / 2)
    ledger.end(8)
    return torch.zeros(1)


def test_what_nobody_waited_for_is_hidden() -> None:
    ledger = Ledger()
    lane = Lane("sums", torch.device("cpu"), ledger=ledger)
    beside = lane.start(lambda: _collective(ledger, 0.02))
    time.sleep(0.2)
    beside.wait()
    spent = ledger.spent()
    assert spent.seconds < 0.01 and spent.codec_seconds < 0.005 and ledger.waited_s < 0.01
    assert ledger.counters.counts()[0].seconds >= 0.02, "counts are of all time"
    waited = lane.start(lambda: _collective(ledger, 0.05))
    waited.wait()
    spent = ledger.spent()
    assert spent.seconds > 0.02 and 0.01 < spent.codec_seconds < spent.seconds and ledger.waited_s > 0.02


def test_a_failure_is_raised_where_it_is_waited_for_and_nothing_runs_after_it() -> None:
    lane, ran, may_fail = Lane("sums", torch.device("cpu")), list[str](), threading.Event()

    def fail() -> Tensor:
        may_fail.wait(10)
        raise ConnectionError("rank 1 is gone")

    def after() -> Tensor:
        ran.append("after")
        return torch.zeros(1)

    first, second = lane.start(fail), lane.start(after)
    may_fail.set()
    for flight in (first, second, lane.start(after)):
        with pytest.raises(ConnectionError, match="rank 1 is gone"):
            flight.wait()
    assert not ran


def test_on_cuda_the_callers_stream_waits_for_the_result_and_not_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that the caller's kernels may read what the lane's have not written yet."""
    queued: list[str] = []
    here = ["caller"]

    class Event:
        def record(self) -> None:
            queued.append(f"{here[-1]} records")

        def wait(self) -> None:
            queued.append("caller waits")

    class Stream:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def wait_stream(self, other: object) -> None:
            queued.append("lane waits")

    class Result(Tensor):
        is_cuda = True  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]

        def record_stream(self, s: object) -> None:
            queued.append("memory is kept")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)

    @contextmanager
    def use_stream(stream: Stream) -> Iterator[None]:
        here.append("lane")
        yield
        here.pop()

    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream())
    lane, threads = Lane("sums", torch.device("cuda", 0)), set[int]()

    def work() -> Tensor:
        threads.add(threading.get_ident())
        return torch.ones(1).as_subclass(Result)

    lane.start(work).wait()
    assert queued == ["lane waits", "lane records", "caller waits", "memory is kept"]
    lane.start(lambda: torch.ones(1)).wait()  # a result that is on the host is there
    lane.close()
    assert queued[4:] == ["lane waits", "lane records"]
    assert threads == {threading.get_ident()}, "NCCL's calls of all lanes come from one thread"
