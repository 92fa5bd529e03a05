"""Starts a server in a session of its own, waits until it is ready, and stops it with all its processes."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

_STOP_S = 20.0
_TAIL_LINES = 25


class StartError(Exception):
    """The server did not start; the message ends with the end of its log."""


class PeerProcess:
    """A server process from construction to ``stop``."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.ready_s: float | None = None  # from start to the first 200 of its health route
        self._asked = False  # to stop: a second signal could interrupt an orderly end
        self._log = log
        self._began = time.perf_counter()
        with log.open("wb") as out:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **env},
                    start_new_session=True,
                )
            except OSError as error:
                raise StartError(f"{command[0]} cannot be run: {error}") from error

    def wait_ready(self, route: str, timeout_s: float) -> None:
        """Wait until ``route`` answers 200.

        Raises:
            StartError: the process ended, or the time is up.
        """
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.perf_counter() < self._began + timeout_s:
                if self._process.poll() is not None:
                    raise StartError(f"ended with status {self._process.returncode}:\n{self.log_tail()}")
                with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                    if client.get(f"{self.url}{route}").status_code == 200:
                        self.ready_s = time.perf_counter() - self._began
                        return
                time.sleep(0.05)
        raise StartError(f"was not ready within {timeout_s:g} s:\n{self.log_tail()}")

    def pids(self) -> list[int]:
        """This server's living processes, including those it started (Linux)."""
        return list(_members(self._process.pid))

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def ask_to_stop(self) -> None:
        if not self._asked and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._asked = True

    def stop(self) -> None:
        """Send SIGTERM to the server, then SIGKILL to what is left of its session."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _members(session: int) -> Iterator[int]:
    """The living processes of a session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in the meantime
        if int(own) == session and state != "Z":
            yield int(folder.name)
