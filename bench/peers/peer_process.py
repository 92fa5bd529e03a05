"""One server in a session of its own: started on a free port, awaited, watched, stopped with all its processes."""

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
_TICKS = os.sysconf("SC_CLK_TCK")
_TAIL_LINES = 25


class StartError(Exception):
    """The server did not come up; the message ends with the tail of its log."""


class PeerProcess:
    """Runs from its making until ``stop``."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.ready_s: float | None = None  # from its start to the first 200 of its health route
        self._asked = False  # to stop; a second signal may cut a clean end short
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
        """Until ``route`` answers 200.

        Raises:
            StartError: the process ended, or the time is up.
        """
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.perf_counter() < self._began + timeout_s:
                if self._process.poll() is not None:
                    raise StartError(f"ended with status {self._process.returncode}:\n{self.log_tail()}")
                try:
                    if client.get(f"{self.url}{route}").status_code == 200:
                        self.ready_s = time.perf_counter() - self._began
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                time.sleep(0.05)
        raise StartError(f"was not ready within {timeout_s:g} s:\n{self.log_tail()}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """This server's processes, those that it started included (Linux)."""
        return [pid for pid, _ in _members(self._process.pid)]

    def cpu_s(self) -> float:
        """Core seconds that its living processes have used."""
        return sum(seconds for _, seconds in _members(self._process.pid))

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def ask_to_stop(self) -> None:
        if not self._asked and self.alive:
            self._process.send_signal(signal.SIGTERM)
        self._asked = True

    def stop(self) -> None:
        """SIGTERM to the server, then SIGKILL to whatever of its session is left."""
        self.ask_to_stop()
        if self.alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # ended by itself
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _members(session: int) -> Iterator[tuple[int, float]]:
    """Each living process of a session, and its core seconds."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        if int(after_name[3]) == session and after_name[0] != "Z":
            yield int(folder.name), (int(after_name[11]) + int(after_name[12])) / _TICKS
