"""Runs a server under test in a session of its own: starts it, waits until it answers, and stops it with all its processes."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import httpx

from tightwire.parent_death import die_with_parent

_STOP_S = 20.0
_TAIL_LINES = 25


class ServerFailedError(Exception):
    """A server did not start, gave wrong answers or failed under load; the message may end with the end of its log."""


class ServerProcess:
    """A server from construction to ``stop``; ``{port}`` becomes a free port. ``others``: its commands on other hosts."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, log: Path, others: Sequence[Sequence[str]] = ()
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.ready_s: float | None = None  # from start to the first 200 of its health route
        self._is_stopping = False  # a second signal could interrupt an orderly end
        self._began = time.perf_counter()
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []
        commands = [[word.replace("{port}", str(port)) for word in command], *others]
        for host, words in enumerate(commands):
            own_log = log.with_name(f"{log.stem}-host{host}{log.suffix}") if host else log
            try:
                self._started.append((_start(words, env, own_log), own_log))
            except OSError as error:
                self.stop()
                raise ServerFailedError(f"{words[0]} cannot be run: {error}") from error

    def wait_ready(self, route: str, timeout_s: float) -> None:
        """Wait until ``route`` answers 200; raises ServerFailedError if the process ends or the time is up."""
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.perf_counter() < self._began + timeout_s:
                self.check()
                with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                    if client.get(f"{self.url}{route}").status_code == 200:
                        self.ready_s = time.perf_counter() - self._began
                        return
                time.sleep(0.05)
        raise ServerFailedError(f"was not ready within {timeout_s:g} s:\n{self.log_tail()}")

    def check(self) -> None:
        """Raise ServerFailedError if a process has ended."""
        for process, log in self._started:
            if process.poll() is not None:
                raise ServerFailedError(f"ended with status {process.returncode}:\n{_tail(log)}")

    def pids(self) -> list[int]:
        """The living processes of this server's sessions (Linux)."""
        return [pid for process, _ in self._started for pid in _members(process.pid)]

    def log_tail(self) -> str:
        """The end of the first process's log."""
        return _tail(self._started[0][1])

    def begin_stop(self) -> None:
        """Send SIGTERM to the first process, which ends those of other hosts."""
        if not self._is_stopping:
            for process, _ in self._started[:1]:
                process.send_signal(signal.SIGTERM)
        self._is_stopping = True

    def stop(self) -> None:
        """Send SIGTERM to the server, then SIGKILL to the processes of its sessions that remain."""
        self.begin_stop()
        for process, _ in self._started[:1]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process, _ in self._started:
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _start(command: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **env},
            start_new_session=True,
            # Also a bench that is killed (SIGKILL, SIGHUP) leaves no server: the kernel sends it SIGTERM.
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509 - one system call
        )


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _members(session: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in the meantime
        if int(own) == session and state != "Z":
            yield int(folder.name)
