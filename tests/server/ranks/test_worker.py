"""Rank processes without a model: what they are told, what they report, and how they end."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
from helpers.comm import rank_bodies
from helpers.server.server_process import is_alive, wait_until

from tightwire.comm.ledger.recording import clock_name
from tightwire.server.config.serve import ServeConfig
from tightwire.server.ipc.channels import bind_receiver, connect_sender
from tightwire.server.ipc.messages import Failed, FromRank, Heartbeat, Record, Recorded, Stage
from tightwire.server.plan.rank_setup import RankIdentity, RankWork, RunPlan
from tightwire.server.ranks import processes
from tightwire.server.ranks.processes import Ranks

WORK = RankWork(
    location="some/model",
    config=ServeConfig(),
    plan=RunPlan(device="cpu", dtype="float32", allreduce="native", transport="none", max_model_len=16, num_blocks=1),
)
WAIT_MS = 30_000

M = TypeVar("M", bound=FromRank)


class Parent:
    """The parent's side of two ranks: their processes, and the inbox for what they say. ``late_s``: listens so late."""

    def __init__(self, body: str, late_s: float = 0.0) -> None:
        self.ranks = Ranks(2, (sys.executable, rank_bodies.__file__, body))
        time.sleep(late_s)
        self._context = zmq.Context()
        self._inbox = bind_receiver(self._context, self.ranks.to_parent)
        self._decoder = msgspec.msgpack.Decoder(FromRank)

    def hear(self, kind: type[M], wanted: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of one kind that is wanted."""
        while self._inbox.poll(WAIT_MS):
            message = self._decoder.decode(self._inbox.recv())
            if isinstance(message, kind) and wanted(message):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def ask(self, rank: int, message: Record) -> None:
        """Send to a rank's reporter."""
        with connect_sender(self._context, self.ranks.reporters[rank]) as sender:
            sender.send(msgspec.msgpack.encode(message))
            sender.setsockopt(zmq.LINGER, WAIT_MS)

    def close(self) -> None:
        self.ranks.kill()
        self._inbox.close(linger=0)
        self._context.term()


@pytest.fixture
def parent(request: pytest.FixtureRequest) -> Iterator[Parent]:
    parent = Parent(request.param)
    yield parent
    parent.close()


def with_body(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("parent", [name], indirect=True, ids=[name])


@with_body("tell")
def test_a_rank_is_told_its_work_and_ends_by_itself(parent: Parent) -> None:
    parent.ranks.hand_out(WORK)
    said: dict[int, list[str]] = {0: [], 1: []}
    while min(map(len, said.values())) < 6:
        stage = parent.hear(Stage, lambda stage: stage.fraction == 1)
        said[stage.rank].append(stage.name)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // 2))
    log_level = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings print a stack when rank 0 has ended
    assert said[0] == ["import", "some/model", threads, log_level, "True", "no torch yet"]
    assert said[1] == ["import", "some/model", threads, log_level, "False", "no torch yet"]
    assert asyncio.run(parent.ranks.wait(30))


@with_body("descend")
def test_one_process_imports_for_all_and_leaves_them_to_the_parent(parent: Parent) -> None:
    forks = parent.ranks.pids[0]
    assert set(parent.ranks.pids.values()) == {forks}
    parent.ranks.hand_out(WORK)
    told = [parent.hear(Stage, lambda stage: stage.rank == 1 and stage.fraction == 1).name for _ in range(4)]
    assert told == ["import", str(forks), str(os.getpid()), "1"], "one socket of a pair: that with its work"
    assert asyncio.run(parent.ranks.wait(30))
    assert not is_alive(forks)
    assert len({forks, *parent.ranks.pids.values()}) == 3


def test_what_could_not_be_imported_is_told_to_a_parent_that_listens_later() -> None:
    with contextlib.closing(Parent("nonsense", late_s=4.0)) as parent:
        assert parent.hear(Failed).message == "KeyError: 'nonsense'"


@with_body("nonsense")
def test_each_rank_tells_what_could_not_be_imported(parent: Parent) -> None:
    failures = [parent.hear(Failed) for _ in range(2)]
    assert {failed.rank for failed in failures} == {0, 1}
    for failed in failures:
        assert (failed.message, failed.doing) == ("KeyError: 'nonsense'", "import")
        assert "in import_body" in failed.traceback


@with_body("sleep")
def test_heartbeats_say_what_a_busy_rank_does(parent: Parent) -> None:
    parent.ranks.hand_out(WORK)
    beat = parent.hear(Heartbeat, lambda beat: beat.step == 4 and beat.busy_s > 0.5)
    assert beat.doing.startswith("step 4: all_reduce ring 8 B, #3, ")
    assert beat.num_collectives == 3
    assert [latency[:3] for latency in beat.latencies] == [("all_reduce", "ring", "")]


@with_body("sleep")
def test_a_rank_that_hangs_still_sends_its_recording(parent: Parent) -> None:
    parent.ranks.hand_out(WORK)
    parent.hear(Heartbeat, lambda beat: beat.num_collectives == 3)
    parent.ask(1, Record(id=8, seconds=0.1))
    first = parent.hear(Recorded)
    last = first if first.last else parent.hear(Recorded, lambda part: part.last)
    assert (first.rank, first.id, last.rank, last.id) == (1, 8, 1, 8)
    assert [(event.number, event.message_bytes, event.finished) for event in first.events] == [(3, 8, False)]
    assert first.clock == clock_name()
    parent.hear(Heartbeat, lambda beat: beat.rank == 1)


@pytest.mark.parametrize(
    ("parent", "message", "symptom"),
    [("fail", "ValueError: out of luck", False), ("lose_peer", "PeerLostError: rank 1 is gone", True)],
    indirect=["parent"],
)
def test_last_words_name_the_error_and_whether_another_rank_caused_it(
    parent: Parent, message: str, symptom: bool
) -> None:
    parent.ranks.hand_out(WORK)
    failed = parent.hear(Failed)
    assert (failed.message, failed.symptom) == (message, symptom)
    assert "Traceback" in failed.traceback
    assert symptom or failed.doing == "step 4"


@with_body("sleep")
def test_signals_are_left_to_the_parent_and_kill_ends_even_a_stopped_rank(parent: Parent) -> None:
    parent.ranks.hand_out(WORK)
    heard = {parent.hear(Heartbeat, lambda beat: beat.step == 4).rank}
    heard.add(parent.hear(Heartbeat, lambda beat: beat.step == 4 and beat.rank not in heard).rank)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in parent.ranks.pids.values():
            os.kill(pid, number)
    parent.hear(Heartbeat, lambda beat: beat.busy_s > 1)
    assert all(map(is_alive, parent.ranks.pids.values()))
    os.kill(parent.ranks.pids[1], signal.SIGSTOP)
    parent.ranks.kill()
    assert not any(map(is_alive, parent.ranks.pids.values()))


def test_signals_are_left_to_the_parent_from_the_first_moment() -> None:
    with Ranks(2, (sys.executable, "-c", "import time; time.sleep(60)")) as ranks:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for pid in ranks.pids.values():
                os.kill(pid, number)
        assert not asyncio.run(ranks.wait(0.5))
        assert all(map(is_alive, ranks.pids.values()))


@with_body("sleep")
def test_an_end_is_noticed_at_once_with_its_signal(parent: Parent) -> None:
    forks = parent.ranks.pids[1]

    async def first_exit() -> tuple[int, int]:
        exits: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        parent.ranks.on_exit(asyncio.get_running_loop(), lambda rank, code: exits.put_nowait((rank, code)))
        wait_until(lambda: parent.ranks.pids[1] != forks, 20)
        os.kill(parent.ranks.pids[1], signal.SIGKILL)
        return await asyncio.wait_for(exits.get(), 20)

    assert asyncio.run(first_exit()) == (1, -signal.SIGKILL)


def test_all_ranks_end_with_the_process_that_would_fork_them() -> None:
    async def exits(ranks: Ranks) -> list[tuple[int, int]]:
        ended: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        ranks.on_exit(asyncio.get_running_loop(), lambda rank, code: ended.put_nowait((rank, code)))
        os.kill(ranks.pids[0], signal.SIGKILL)
        return [await asyncio.wait_for(ended.get(), 20) for _ in range(2)]

    with Ranks(2, (sys.executable, "-c", "import time; time.sleep(60)")) as ranks:
        assert sorted(asyncio.run(exits(ranks))) == [(0, -signal.SIGKILL), (1, -signal.SIGKILL)]


def test_no_variable_of_the_user_starts_threads_before_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    assert processes._environment(2, "")["OPENBLAS_NUM_THREADS"] == "1"


def test_what_ranks_import_starts_no_thread_and_opens_no_gpu() -> None:
    look = "print(len(os.listdir('/proc/self/task')), torch.cuda.is_initialized())"
    command = [sys.executable, "-c", f"import os, torch, tightwire.server.ranks.rank_main; {look}"]
    told = subprocess.run(command, env=processes._environment(1, ""), capture_output=True, text=True, check=True)
    assert told.stdout == "1 False\n"


def test_an_import_that_ends_before_it_is_told_anything_is_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    with Ranks(2, ("false",)) as ranks:
        assert asyncio.run(ranks.wait(20))
        assert [end.result() for end in ranks._exits.values()] == [1, 1]


def test_a_rank_that_is_forked_when_the_parent_has_just_died_says_nothing() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    names = {"to_parent": "", "inboxes": (), "reporter": "", "store_port": 0, "store_fd": None}
    identity = RankIdentity(rank=0, world_size=1, parent_pid=os.getpid(), work_fd=theirs.fileno(), **names)
    command, line = [sys.executable, rank_bodies.__file__, "tell"], msgspec.json.encode([identity]) + b"\n"
    with theirs:
        given = {"input": line, "pass_fds": (theirs.fileno(),), "env": processes._environment(1, "")}
        told = subprocess.run(command, **given, stderr=subprocess.PIPE, check=True)
    assert told.stderr == b""


def test_a_fork_that_fails_is_told_in_a_line() -> None:
    ours, theirs = socket.socketpair()
    names = {"to_parent": "", "inboxes": (), "reporter": "", "store_port": 0, "store_fd": None}
    identity = RankIdentity(rank=3, world_size=4, parent_pid=os.getpid(), work_fd=theirs.fileno(), **names)
    fails = "def fork(): raise OSError(11, 'Resource temporarily unavailable')"
    code = f"import os, sys\nfrom tightwire.server.ranks import worker\n{fails}\nos.fork = fork\nsys.exit(worker.main(lambda: None))"
    with ours, theirs:
        given = {"input": msgspec.json.encode([identity]) + b"\n", "pass_fds": (theirs.fileno(),)}
        told = subprocess.run([sys.executable, "-c", code], **given, stderr=subprocess.PIPE, check=False)
    assert told.returncode == 1 and told.stderr.startswith(
        b"rank 3 cannot be forked: Resource temporarily unavailable;"
    )
    assert told.stderr.count(b"\n") == 1


def test_work_is_handed_out_before_a_rank_can_read_it() -> None:
    """It may be more than a pipe or socket holds."""
    with Ranks(1, (sys.executable, "-c", "import time; time.sleep(60)")) as ranks:
        handing = threading.Thread(
            target=ranks.hand_out, args=(msgspec.structs.replace(WORK, location="x" * (4 << 20)),), daemon=True
        )
        handing.start()
        handing.join(10)
        assert not handing.is_alive()


def test_ranks_that_the_kernel_gives_to_another_parent_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where SIGCHLD is ignored, no exit code can be had."""
    monkeypatch.setattr(processes, "adopt_orphans", lambda adopts: None)
    with Ranks(2, (sys.executable, rank_bodies.__file__, "sleep")) as ranks:
        ends = asyncio.run(ranks.wait(20))
        assert ends and [end.result() for end in ranks._exits.values()] == [1, 1]


@with_body("sleep")
def test_a_rank_ends_when_its_input_does(parent: Parent) -> None:
    """The second way a parent's death shows, where the kernel was not asked to tell."""
    parent.ranks.hand_out(WORK)
    parent.hear(Heartbeat, lambda beat: beat.rank == 1)
    parent.ranks._works[1].close()
    wait_until(lambda: not is_alive(parent.ranks.pids[1]), 30)
    assert is_alive(parent.ranks.pids[0])
