"""Runs the measured server: ``tightwire serve`` as a child process."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tightwire
from tightwire.server.ranks.parent_death import die_with_parent

SERVE = (sys.executable, "-m", "tightwire", "serve")
_READY = re.compile(r"ready in .* at (http://\S+):")
_SAYS = "tightwire serve:"
_TAIL_LINES = 20
_GRACE_S = 10.0  # it is idle at its end


class ServerRefusedError(ValueError):
    """The server would not start as asked; the message is in its own words."""


class ServerDiedError(RuntimeError):
    """The server ended by itself; the message has the end of its log."""


class ServerChild:
    """A server on a free port. It ends with the context, and also when this process dies.

    Construct on the main thread: the kernel ties a child to the thread that started it.
    """

    def __init__(self, arguments: Sequence[str], command: Sequence[str] = SERVE) -> None:
        self.command = [*command, *arguments, "--port", "0"]
        source = str(Path(tightwire.__file__).parent.parent)
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={
                **os.environ,
                # The server runs this process's own code, also where it was never installed.
                "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")])),
            },
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - two system calls, and no other thread runs yet
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_GRACE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> list[str]:
        """The lines so far."""
        return list(self._lines)

    def wait_ready(self, timeout_s: float) -> str:
        """Its URL, once it would answer a request.

        Raises:
            ServerRefusedError: it refused its options, or the machine cannot do what they ask.
            ServerDiedError: it failed, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for line in self.log:
                if found := _READY.search(line):
                    return found[1]
            self.check()
            if time.monotonic() > deadline:
                raise ServerDiedError(f"the server was not ready within {timeout_s:g} s; its log ends:\n{self._tail()}")
            time.sleep(0.02)

    def check(self) -> None:
        """Raise when it has ended: ServerRefusedError or ServerDiedError."""
        code = self._process.poll()
        if code is None:
            return
        self._reader.join(_GRACE_S)
        if code == 2:
            raise ServerRefusedError(self._refusal())
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ServerDiedError(f"the server ended {how}; its log ends:\n{self._reason()}")

    def _refusal(self) -> str:
        reason = self._reason()
        return f"the server says: {reason}" if reason.startswith(_SAYS) else reason

    def _reason(self) -> str:
        """The log from the last line of the server's own on; without one, the end of the log."""
        lines = self.log
        first = max((i for i, line in enumerate(lines) if line.startswith(_SAYS)), default=None)
        return self._tail() if first is None else "\n".join(lines[first : first + _TAIL_LINES])

    def _tail(self) -> str:
        return "\n".join(self.log[-_TAIL_LINES:]) or "(it wrote nothing)"

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip("\n"))


def _end_with_parent() -> None:
    """Runs in the child before its program starts. A terminal's Ctrl-C must not reach it: this process ends it."""
    die_with_parent(signal.SIGTERM)
    os.setsid()
