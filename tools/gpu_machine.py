"""Runs commands for ``gpu_check.py``: each with a deadline, all output in log.txt as it comes, and no process that outlives it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_sizes import FULL, Sizes

from tightwire.parent_death import die_with_parent

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "gpu-check"  # packages, models and runs; results are in gpu-check-out/ or $OUT
TIGHTWIRE = (sys.executable, "-m", "tightwire")
PORT = "8137"
NOTHING: Mapping[str, str] = {}
_GRACE_S = 10.0  # for a bench that is interrupted to write what it has


class CommandError(RuntimeError):
    """A command failed or took too long. ``output``: all that it wrote. ``figures``: what a stage makes of it."""

    def __init__(self, message: str, output: str = "", figures: Any = None) -> None:
        super().__init__(message)
        self.output, self.figures = output, figures


class LeftOutError(Exception):
    """This machine lacks what a stage needs. ``figures``: what it could measure."""

    def __init__(self, message: str, figures: Any = None) -> None:
        super().__init__(message)
        self.figures = figures


@dataclass(frozen=True)
class Stage:
    """``run`` returns figures or raises; ``limit_s``: the longest that all its commands may take together."""

    name: str
    run: Callable[["Machine"], Any]
    limit_s: float


class Machine:
    """``deadline``: of the running stage. ``environment``: of commands. ``devices``: their names, None before anybody asked."""

    def __init__(self, out: Path, sizes: Sizes = FULL, *, emulated: bool = False) -> None:
        self.out, self.sizes, self.deadline = out, sizes, float("inf")
        self.log = out / "log.txt"
        self.devices: list[str] | None = None
        given = [] if emulated else [os.environ.get("PYTHONPATH", "")]
        site = [f"{ROOT}/tests/helpers/emulated/site"] if emulated else []  # before all others
        folders = filter(None, [*site, *given, f"{ROOT}/src", f"{ROOT}/tests", str(SITE)])
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}

    def run(self, command: Sequence[str], *, into: Path | None = None, environment: Mapping[str, str] = NOTHING) -> str:
        """All that the command writes, also to the log. CommandError: it failed, or the stage's time was over, and its group has ended.

        ``into``: a file for its standard output, which is then what is returned.
        """
        child, start = self._start(command, environment, into)
        try:
            child.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(child)
            raise CommandError("took longer than its stage may", self._written(start)) from None
        except BaseException:
            _end(child)
            raise
        text = self._written(start)
        if child.returncode:
            raise CommandError(f"ended with {child.returncode}; {text.strip()[-300:]}", text)
        return text if into is None else into.read_text()

    def figures(self, *command: str, environment: Mapping[str, str] = NOTHING) -> Any:
        """The JSON object at the end of a command's output; a command that fails raises CommandError with it."""
        try:
            found = last_json(self.run(command, environment=environment))
        except CommandError as error:
            error.figures = last_json(error.output)
            if error.figures and error.figures.get("error") not in (None, "interrupted"):
                raise CommandError(str(error.figures["error"]), error.output, error.figures) from None
            raise
        if found is None:
            raise CommandError("ended without a JSON object; see log.txt")
        return found

    @contextlib.contextmanager
    def serving(self, *options: str) -> Iterator[str]:
        """A server that answers, and its address. Its output is in server.log: between that of a bench it could tear its JSON."""
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(PORT))) == 0:
                raise RuntimeError(f"port {PORT} is in use, perhaps by a server of an earlier check: end it first")
        log = self.out / "server.log"
        server, start = self._start([*TIGHTWIRE, "serve", *options, "--port", PORT], NOTHING, log=log)
        try:
            while not _healthy():
                if server.poll() is not None:
                    raise CommandError(f"the server ended: {self._written(start, log)[-300:].strip()}")
                if time.monotonic() > self.deadline:
                    raise CommandError("the server did not answer before its stage's time was over")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{PORT}"
        finally:
            _end(server)

    def _start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        into: Path | None = None,
        log: Path | None = None,
    ) -> tuple["subprocess.Popen[bytes]", int]:
        """The process, and where in the log its output begins."""
        path = log or self.log
        with path.open("ab") as log_file, (into or path).open("wb" if into else "ab") as out:
            log_file.write(f"\n$ {' '.join(command)}\n".encode())
            log_file.flush()
            start = log_file.tell()  # not later: the child moves this place with what it writes
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log_file,
                cwd=ROOT,
                env={**self.environment, **environment},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call
            )
            return child, start

    def _written(self, start: int, log: Path | None = None) -> str:
        with (log or self.log).open("rb") as log_file:
            log_file.seek(start)
            return log_file.read().decode(errors="replace")


def last_json(text: str) -> Any:
    """The last JSON object that begins a line, or None: warnings may follow it."""
    lines = text.splitlines()
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith("{"):
            with contextlib.suppress(ValueError):
                return json.JSONDecoder().raw_decode("\n".join(lines[number:]))[0]
    return None


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Interrupt the process's group, as Ctrl-C does, and kill what remains."""
    for number, grace_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)


def _healthy() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
