"""A server in a process of its own, for the length of a measurement: started on a free port, awaited, stopped."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_STOP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    url: str
    ready_s: float  # from the start of the process to the first 200 of /health/ready


@contextmanager
def serving(model: str, flags: Sequence[str], *, log: Path, timeout_s: float = 300.0) -> Iterator[RunningServer]:
    """Run ``tightwire serve MODEL flags`` until the block ends.

    Raises:
        SystemExit: it ended or was not ready in time; the message has the end of its log.
    """
    port = free_port()
    command = [sys.executable, "-m", "tightwire", "serve", model, "--port", str(port), *flags]
    with log.open("wb") as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, began + timeout_s, log)
            yield RunningServer(url=url, ready_s=time.perf_counter() - began)
        finally:
            _stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, deadline: float, log: Path) -> None:
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while time.perf_counter() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"tightwire serve ended with status {process.returncode}:\n{_tail(log)}")
            try:
                if client.get(f"{url}/health/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.02)
    raise SystemExit(f"tightwire serve was not ready in time:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
