"""`tightwire serve` as a real process, for tests: start it, read its log, find its ranks, wait for its end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import httpx

_SOURCE = Path(__file__).parents[3] / "src"
START_S = 240.0  # a tiny model takes two seconds; a busy machine many times that
_LOG_LINES = 300  # of a server that does not start, in the failure's message
SERVE = (sys.executable, "-m", "tightwire", "serve")


class ServerProcess:
    """A server on a free port, which logs details. Its temporary folder is its own, so that leftovers are seen."""

    def __init__(self, folder: Path, *arguments: str, command: Sequence[str] = SERVE) -> None:
        self.temp = folder
        self.temp.mkdir()
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [*command, "--log-level", "debug", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(_SOURCE),
                "TMPDIR": str(folder),
                "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(timeout=5)
        if not self._reader.is_alive():  # a process that is left still has the pipe, and closing would wait for it
            assert self.process.stderr is not None
            self.process.stderr.close()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._lines.extend(iter(self.process.stderr.readline, ""))

    def wait_ready(self, *others: "ServerProcess", timeout_s: float = START_S) -> str:
        """Its URL, once the ready line is out. ``others``: the servers on the other hosts, which it waits for."""
        hosts, deadline = (self, *others), time.monotonic() + timeout_s
        while not (found := re.search(r"ready in .* at (http://\S+\d)", self.log)):
            late = time.monotonic() > deadline
            if late or any(host.process.poll() is not None for host in hosts):
                logs = [f"--- host {number} ---\n{host.last_words()}" for number, host in enumerate(hosts)]
                raise AssertionError(
                    "\n".join([f"not ready within {timeout_s:g} s" if late else "a host ended", *logs])
                )
            time.sleep(0.02)
        return found[1]

    def last_words(self) -> str:
        """End its processes, which write where their threads are, and return the end of the log."""
        # Ranks first: they end with their parent.
        for pid in (*self.ranks(), self.process.pid) if self.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError, AssertionError):
                os.kill(pid, signal.SIGABRT)
                wait_until(lambda pid=pid: not is_alive(pid), 5.0)
        self._reader.join(timeout=5)
        return "".join(self._lines[-_LOG_LINES:])

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in the order they were started."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait_ranks(self, number: int = 2) -> list[int]:
        """Process ids of the ranks as soon as all are started, long before they are ready."""
        wait_until(lambda: len(self.ranks()) == number, START_S)
        return self.ranks()

    def wait_exit(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout=5)
        return code

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        self.process.send_signal(number)
        return self.wait_exit(timeout_s)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended but has not been reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def complete(url: str, max_tokens: int, timeout_s: float = 60.0) -> httpx.Response:
    """A completion that ends at ``max_tokens`` and nowhere else."""
    body = {"prompt": "hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=timeout_s, trust_env=False)


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=60, trust_env=False)


class Streaming:
    """A long streamed completion in a thread, and what became of it."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events: list[str] = []
        self.failure: Exception | None = None
        self._url, self._max_tokens = url, max_tokens
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: len(self.events) > 2 or not self._thread.is_alive(), 60)

    def _run(self) -> None:
        body = {"prompt": "hello", "max_tokens": self._max_tokens, "stream": True, "ignore_eos": True}
        url = f"{self._url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, timeout=120, trust_env=False) as response:
                self.events.extend(line for line in response.iter_lines() if line)
        except httpx.HTTPError as error:
            self.failure = error

    def finish(self, timeout_s: float) -> list[str]:
        """All events, once the stream has ended."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the stream did not end within {timeout_s} s"
        return self.events
