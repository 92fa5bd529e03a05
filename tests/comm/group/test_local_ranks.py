import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.comm.local_rank_bodies import count_to, die, echo, open_nothing, refuse_to_open, say_and_raise, sleep

from tightwire.comm.group.local_ranks import LocalRankError, LocalRanks


@pytest.fixture
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(3, open_nothing, silence_s=30) as ranks:
        yield ranks


def _gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_values_come_in_order_from_every_rank_and_calls_follow_each_other(ranks: LocalRanks) -> None:
    for limit in (4, 0, 2):
        heard: dict[int, list[int]] = {rank: [] for rank in range(3)}
        for rank, value in ranks.stream(count_to, limit):
            heard[rank].append(value)
        assert heard == {rank: [rank * 100 + i for i in range(limit)] for rank in range(3)}


def test_values_come_while_the_function_runs() -> None:
    with LocalRanks(1, open_nothing, silence_s=30) as ranks:
        start = time.monotonic()
        events = ranks.stream(echo, "first", 20.0)
        assert next(events) == (0, "first")
        assert time.monotonic() - start < 20.0
        ranks.kill()


def test_what_a_rank_raises_is_told_and_ends_all(ranks: LocalRanks) -> None:
    with pytest.raises(LocalRankError, match=r"rank 1 of 3 raised:\n(.|\n)*KeyError: 'on purpose'") as caught:
        list(ranks.stream(say_and_raise, 1))

    assert caught.value.rank == 1
    assert all(_gone(pid) for pid in ranks.pids)


def test_a_rank_that_dies_is_named(ranks: LocalRanks) -> None:
    with pytest.raises(LocalRankError, match="rank 2 of 3 died with exit code -9") as caught:
        list(ranks.stream(die, 2))

    assert caught.value.rank == 2
    assert all(_gone(pid) for pid in ranks.pids)


def test_silence_has_an_end() -> None:
    with LocalRanks(2, open_nothing) as ranks:
        ranks._silence_s = 0.5  # a rank may start slower than that
        with pytest.raises(LocalRankError, match=r"ranks \[0, 1\] sent nothing for 0.5 s in sleep"):
            list(ranks.stream(sleep, 60.0))
        assert all(_gone(pid) for pid in ranks.pids)


def test_a_rank_that_cannot_join_says_why() -> None:
    with pytest.raises(LocalRankError, match=r"rank \d of 2 could not join:\n(.|\n)*OSError: no wire"):
        LocalRanks(2, refuse_to_open)


def test_an_error_of_the_parent_ends_the_ranks_at_once() -> None:
    with pytest.raises(ZeroDivisionError), LocalRanks(2, open_nothing, silence_s=60) as ranks:
        events = ranks.stream(echo, "busy", 60.0)
        next(events)
        raise ZeroDivisionError
    assert all(_gone(pid) for pid in ranks.pids)


_UNINTERRUPTED = """
import signal
from helpers.comm.local_rank_bodies import open_nothing
from multiprocessing.forkserver import _forkserver
from tightwire.comm.group.local_ranks import LocalRanks
if __name__ == "__main__":
    with LocalRanks(1, open_nothing, silence_s=60):
        for pid in ("self", _forkserver._forkserver_pid):
            (held,) = (line for line in open(f"/proc/{pid}/status") if line.startswith("SigBlk"))
            print(int(held.split()[1], 16) >> signal.SIGINT - 1 & 1)
"""


def test_ctrl_c_is_held_back_from_the_fork_server_whose_imports_it_would_break_off(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_UNINTERRUPTED)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=env, timeout=240, check=True
    )
    assert done.stdout.split() == ["0", "1"]  # this process goes on hearing it


_PARENT = """
from helpers.comm.local_rank_bodies import open_nothing, sleep
from tightwire.comm.group.local_ranks import LocalRanks
if __name__ == "__main__":
    with LocalRanks(2, open_nothing, silence_s=60) as ranks:
        print(*ranks.pids, flush=True)
        list(ranks.stream(sleep, 60.0))
"""


def test_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2

        parent.send_signal(signal.SIGKILL)
        parent.wait(10)

    assert all(_gone(pid) for pid in pids)
