"""Server processes: their end is reported with the log, and none of their processes is left."""

import os
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


def _runs(pid: int) -> bool:
    """A killed orphan may stay a zombie until init looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" and os.getpgid(pid) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False
