"""Server processes: their end is reported with the log, and none of their processes is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightwire.bench.server_process import ServerFailedError, ServerProcess


def test_a_server_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    server = ServerProcess(
        [sys.executable, "-c", "print('no such file'); raise SystemExit(3)"], {}, log=tmp_path / "log"
    )
    with pytest.raises(ServerFailedError, match="(?s)status 3.*no such file"):
        server.wait_ready("/health", 20.0)


def test_stop_ends_the_processes_that_a_server_started(tmp_path: Path) -> None:
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    server = ServerProcess([sys.executable, "-c", script], {}, log=tmp_path / "log")
    deadline = time.monotonic() + 20.0
    while len(server.pids()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    pids = server.pids()

    server.stop()

    assert len(pids) == 2
    while server.pids() and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel ends a killed process soon
    assert server.pids() == [] and not any(_runs(pid) for pid in pids)


_BENCH = """
import sys, time
from pathlib import Path
from tightwire.bench.server_process import ServerProcess
server = ServerProcess(["sleep", "60"], {}, log=Path(sys.argv[1]))
print(*server.pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_bench_that_is_killed_leaves_no_server(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", _BENCH, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        pids = [int(pid) for pid in bench.stdout.readline().split()]
        assert len(pids) == 1 and _runs(pids[0])
        bench.send_signal(number)
        assert bench.wait(20) == -number
    deadline = time.monotonic() + 20.0
    while _runs(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pids[0])


def _runs(pid: int) -> bool:
    """A killed orphan may stay a zombie until init looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" and os.getpgid(pid) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False
