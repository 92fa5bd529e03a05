"""What the HTTP process does when its own ears fail: it says so and ends, and does not wait for ever."""

import asyncio
import sys

import pytest

from tightwire.progress import Progress
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.base import Hosts
from tightwire.server.hosts.place import NotNowError
from tightwire.server.ipc.engine_client import Phase
from tightwire.server.ipc.messages import Stage
from tightwire.server.ranks.processes import Ranks
from tightwire.server.ranks.ranked_engine import RankedEngine, RankFailedError

# Reports a stage to the address in its first line, as a rank would, and then waits to be killed.
_RANK = """
import sys, time, msgspec, zmq
from tightwire.server.ipc.channels import connect_sender
from tightwire.server.ipc.messages import Stage
address = msgspec.json.decode(sys.stdin.readline())[0]["to_parent"]
context = zmq.Context()
sender = connect_sender(context, address)
sender.send(msgspec.msgpack.encode(Stage(rank=0, name="import", fraction=0.0)))
time.sleep(60)
"""


class _BrokenProgress(Progress):
    def stage(self, name: str, fraction: float, rank: int = 0) -> None:
        raise ValueError(f"cannot show {name}")


async def test_a_fault_while_listening_ends_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    progress = _BrokenProgress(1)
    with Ranks(1, command=(sys.executable, "-c", _RANK)) as ranks:
        async with RankedEngine(ServeConfig(), ranks, progress) as engine:
            with pytest.raises(RankFailedError, match="engine client broke: ValueError.*cannot show import"):
                await engine.wait_ready()
            assert engine.client.state.phase is Phase.DEAD
    assert "the engine client broke" in caplog.text


async def test_a_host_that_refuses_is_named_on_the_others() -> None:
    with Ranks(1, command=(sys.executable, "-c", _RANK)) as ranks:
        async with RankedEngine(ServeConfig(), ranks, Progress(1)) as engine:
            engine.note_end("node 1 (10.0.0.2)", 2, "no space left on device")
            with pytest.raises(ValueError, match=r"^node 1 \(10\.0\.0\.2\): no space left on device$"):
                await engine.wait_ready()


async def test_a_finished_stage_is_not_told_as_a_percentage() -> None:
    with Ranks(1, command=(sys.executable, "-c", _RANK)) as ranks:
        async with RankedEngine(ServeConfig(), ranks, Progress(1)) as engine:
            told = list[str]()
            for fraction in (0.0, 0.4, 1.0):
                engine.hear(Stage(rank=0, name="import", fraction=fraction))
                told.append(engine.client.state.reason)
            assert told == ["import", "import 40 %", "import done"]


async def test_a_host_that_stops_while_all_load_is_no_failure() -> None:
    with Ranks(1, command=(sys.executable, "-c", _RANK)) as ranks:
        async with RankedEngine(ServeConfig(), ranks, Progress(1)) as engine:
            engine.hosts = others = _OtherHosts()
            engine.note_end("node 1 (10.0.0.2)", 0, "")
            assert engine.stop_asked.is_set() and others.told == ["end with 0"]
            assert engine.client.state.phase is Phase.LOADING


async def test_a_taken_port_ends_all_hosts_so_that_they_start_again() -> None:
    with Ranks(1, command=(sys.executable, "-c", _RANK)) as ranks:
        async with RankedEngine(ServeConfig(), ranks, Progress(1)) as engine:
            engine.hosts = others = _OtherHosts()
            with pytest.raises(RankFailedError, match="port 29601 is taken"):
                await engine.start()
            assert others.told == ["end with 1"]


class _OtherHosts(Hosts):
    """What other hosts are told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def relay_exit(self, rank: int, code: int) -> None:
        self.told.append(f"rank {rank} exited with {code}")

    async def join(self) -> None:
        raise NotNowError("port 29601 is taken")

    def fail(self, code: int, reason: str) -> None:
        self.told.append(f"end with {code}")

    async def close(self) -> None:
        await asyncio.sleep(0.5)  # as to other hosts
        self.told.append("the end")


async def test_a_host_that_ends_says_so_before_its_ranks_are_killed() -> None:
    with Ranks(1, command=(sys.executable, "-c", _RANK)) as ranks:
        async with RankedEngine(ServeConfig(), ranks, Progress(1)) as engine:
            engine.hosts = others = _OtherHosts()
    assert others.told[0] == "the end"
