"""Runs the measured server: ``tightwire serve`` as a child process."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tightwire
from tightwire.server.ranks.parent_death import die_with_parent

SERVE = (sys.executable, "-m", "tightwire", "serve")
_READY = re.compile(r"ready in .* at (http://\S+\d)")
_OWN_LINE = "tightwire serve:"  # how the server's own errors begin
_TAIL_LINES = 20
_STOP_S = 10.0  # it is idle at its end


class ServerRefusedError(ValueError):
    """The server refused its options; the message is the server's own."""


class ServerDiedError(RuntimeError):
    """The server ended by itself; the message has the end of its log."""


class ServerChild:
    """A server on a free port. It ends with the context, and also when this process dies.

    Construct it on the main thread: the kernel ties a child to the thread that started it.
    """

    def __init__(self, arguments: Sequence[str], command: Sequence[str] = SERVE) -> None:
        # The server runs this process's own code, also where it was never installed.
        path = [str(Path(tightwire.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [*command, *arguments, "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - two system calls, and no other thread runs yet
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> list[str]:
        """The lines so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace").splitlines()

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until the server answers requests; returns its URL.

        Raises:
            ServerRefusedError: it refused its options, or the machine cannot do what they ask.
            ServerDiedError: it failed, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if found := next(filter(None, map(_READY.search, self.log)), None):
                return found[1]
            self.check()
            if time.monotonic() > deadline:
                raise ServerDiedError(f"the server was not ready within {timeout_s:g} s; its log ends:\n{self._end()}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raise ServerRefusedError or ServerDiedError if the server has ended."""
        code = self._process.poll()
        if code is None:
            return
        if code == 2:
            raise ServerRefusedError(f"the server refused to start: {self._end()}")
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ServerDiedError(f"the server ended {how}; its log ends:\n{self._end()}")

    def _end(self) -> str:
        """The log from the server's last own line on, before the ranks' tracebacks; without one, its last lines."""
        lines = self.log
        first = max((i for i, line in enumerate(lines) if line.startswith(_OWN_LINE)), default=None)
        shown = lines[-_TAIL_LINES:] if first is None else lines[first : first + _TAIL_LINES]
        return "\n".join(shown) or "(it wrote nothing)"


def _end_with_parent() -> None:
    """Runs in the child before its program starts. A terminal's Ctrl-C must not reach it: this process ends it."""
    die_with_parent(signal.SIGTERM)
    os.setsid()
