"""A server that stays stopped is ended by its ranks; one that only pauses is not. Signals are noted where there is something to save."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tightwire.parent_death import end_signals, end_stopped_parent, process_age_s, state_of, stop_signals


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_stopped_server_is_killed_and_says_so(
    process: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    watcher = threading.Thread(target=end_stopped_parent, args=(process.pid, 0.4), daemon=True)
    watcher.start()
    time.sleep(0.6)
    assert process.poll() is None and state_of(process.pid) == "S", "it was not stopped"
    process.send_signal(signal.SIGSTOP)
    assert process.wait(10) == -signal.SIGKILL
    watcher.join(10)
    assert f"(pid {process.pid}) has been stopped (SIGSTOP)" in capfd.readouterr().err


def test_signals_are_noted_from_the_first_look_on(request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a command that ran in this process may have set it
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    with stop_signals() as look:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert look() == 0
        signal.raise_signal(signal.SIGTERM)
        assert look() == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a second one ends the process"
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_the_death_of_a_parent_of_many_threads_is_noted_as_one_signal(tmp_path: Path) -> None:
    child = """
import os, pathlib, signal, sys, time
from tightwire.parent_death import die_with_parent, stop_signals
with stop_signals() as look:
    look()
    die_with_parent(signal.SIGTERM)
    print(os.getpid(), flush=True)
    while not look():
        time.sleep(0.0001)
    time.sleep(0.5)
    pathlib.Path(sys.argv[1], "saved").touch()
"""
    parent = """
import subprocess, sys, threading, time
for _ in range(100):
    threading.Thread(target=time.sleep, args=(60,)).start()
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
"""
    with subprocess.Popen([sys.executable, "-c", parent, child, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    while state_of(pid) not in ("", "Z"):
        time.sleep(0.01)
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_asks_a_process_to_end_unless_nohup_has_it_ignored(
    ignored: bool, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    assert (signal.SIGHUP in end_signals()) != ignored


def test_this_process_has_an_age() -> None:
    assert 0 < process_age_s() < 7 * 24 * 3600
