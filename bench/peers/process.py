"""Starts a server in a session of its own, checks its answers, puts load on it, and stops it with all its processes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CHECK_PROMPTS = (
    "The capital of France is",
    "Water is made of two elements: hydrogen and",
    "The opposite of hot is",
    "One, two, three, four, five, six,",
)
_CHECK_TOKENS = 16
_CHECK_CHARS = 6  # that an answer must share with the first server's: one or two words
_MAX_DIFFERENT = 1  # answers; another precision may change one of them
_LOAD_S = 600.0
_STOP_S = 20.0
_TAIL_LINES = 25


class PeerError(Exception):
    """A peer did not start, gave wrong answers or failed under load; the message may end with the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The load of one round; the round's seed fixes the prompts."""

    concurrency: tuple[int, ...]
    num_requests: tuple[int, ...]  # for each concurrency
    input_len: int
    output_len: int


class PeerProcess:
    """A server process from construction to ``stop``.

    Args:
        command: ``{port}`` in it becomes a free port.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, log: Path) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.ready_s: float | None = None  # from start to the first 200 of its health route
        self._log = log
        self._is_stopping = False  # a second signal could interrupt an orderly end
        self._began = time.perf_counter()
        with log.open("wb") as out:
            try:
                self._process = subprocess.Popen(
                    [word.replace("{port}", str(port)) for word in command],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **env},
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerError(f"{command[0]} cannot be run: {error}") from error

    def wait_ready(self, route: str, timeout_s: float) -> None:
        """Wait until ``route`` answers 200.

        Raises:
            PeerError: the process ended, or the time is up.
        """
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.perf_counter() < self._began + timeout_s:
                if self._process.poll() is not None:
                    raise PeerError(f"ended with status {self._process.returncode}:\n{self.log_tail()}")
                with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                    if client.get(f"{self.url}{route}").status_code == 200:
                        self.ready_s = time.perf_counter() - self._began
                        return
                time.sleep(0.05)
        raise PeerError(f"was not ready within {timeout_s:g} s:\n{self.log_tail()}")

    def pids(self) -> list[int]:
        """The living processes of this server's session (Linux)."""
        return list(_members(self._process.pid))

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def begin_stop(self) -> None:
        if not self._is_stopping and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._is_stopping = True

    def stop(self) -> None:
        """Send SIGTERM to the server, then SIGKILL to the processes of its session that remain."""
        self.begin_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _members(session: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in the meantime
        if int(own) == session and state != "Z":
            yield int(folder.name)


def greedy_answers(url: str, model: str | None) -> list[str]:
    """The server's greedy answers to ``CHECK_PROMPTS``. ``model``: None for the first one that the server lists.

    Raises:
        PeerError: it does not answer.
    """
    try:
        # llama.cpp closes idle connections, which would look like a missing answer.
        headers = {"Connection": "close"}
        with httpx.Client(timeout=120.0, trust_env=False, base_url=f"{url}/v1", headers=headers) as client:
            name: str = model or client.get("/models").raise_for_status().json()["data"][0]["id"]
            return [_answer(client, name, prompt) for prompt in CHECK_PROMPTS]
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise PeerError(f"it does not answer a plain prompt: {type(error).__name__}: {error}") from error


def _answer(client: httpx.Client, model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": _CHECK_TOKENS, "temperature": 0, "stream": True}
    text = ""
    with client.stream("POST", "/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data:") and "[DONE]" not in line:
                text += json.loads(line.removeprefix("data:"))["choices"][0].get("text") or ""
    return text


def compare_answers(reference: Sequence[str], answers: Sequence[str]) -> None:
    """Accept answers that begin like ``reference``, up to differences that rounding explains.

    Raises:
        PeerError: too many answers begin differently.
    """
    different = [
        f"{prompt!r}: {theirs!r} instead of {ours!r}"
        for prompt, ours, theirs in zip(CHECK_PROMPTS, reference, answers, strict=True)
        if ours[:_CHECK_CHARS] != theirs[:_CHECK_CHARS]
    ]
    if len(different) > _MAX_DIFFERENT:
        raise PeerError("its greedy answers are not those of the first server; " + "; ".join(different))


def bench_serve(
    url: str, load: Load, *, seed: int, output: Path | None = None, label: str = "peer", flags: Sequence[str] = ()
) -> dict[str, Any]:
    """The result of `tightwire bench serve` in a process of its own; ``output``: the folder for raw samples.

    Raises:
        PeerError: the load did not finish, or requests failed.
    """
    command = [sys.executable, "-m", "tightwire", "bench", "serve", "--url", url, "--seed", str(seed), "--warmups", "1"]
    for flag, values in (("--concurrency", load.concurrency), ("--num-requests", load.num_requests)):
        command += [flag, ",".join(map(str, values))]
    command += ["--input-len", str(load.input_len), "--output-len", str(load.output_len), *flags]
    command += ["--output", str(output), "--label", f"{label}-seed{seed}"] if output else []
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LOAD_S, check=False, text=True)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"the load did not end within {_LOAD_S:g} s") from error
    if done.returncode != 0 or not done.stdout:
        raise PeerError(
            f"bench serve ended with status {done.returncode}:\n{(done.stderr or done.stdout).strip()[-500:]}"
        )
    result = json.loads(done.stdout.splitlines()[-1])
    for one in result["cells"]:
        if one["failed"] or not one["ttft_s"]:
            raise PeerError(f"{one['name']}: {one['failed']} requests failed: {one['errors']}")
    return result
