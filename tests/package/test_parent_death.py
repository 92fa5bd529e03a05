"""A server that stays stopped is ended by its ranks; one that only pauses is not. Signals are noted where there is something to save."""

import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from tightwire.parent_death import end_stopped_parent, process_age_s, state_of, stop_signals


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


def test_this_process_has_an_age() -> None:
    assert 0 < process_age_s() < 7 * 24 * 3600
