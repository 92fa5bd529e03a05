"""Runs each probe in a process of its own with a time limit, and reports its facts or its failure.

A hanging driver or a crashing library ends its own process, not the doctor's. ``python -m tightwire.bench.doctor.probing
MODULE:FUNCTION`` is that process; it writes facts, one line of JSON each.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import tightwire
from tightwire.bench.doctor.facts import Facts
from tightwire.server.ranks.parent_death import die_with_parent

_MAX_OUTPUT_BYTES = 1 << 20
_MAX_ERROR_CHARS = 400  # CUDA's errors include long advice
_REAP_S = 2.0  # to wait for a killed process; one that hangs inside the kernel is left behind
_CHILD = (sys.executable, "-m", "tightwire.bench.doctor.probing")


class Finding(msgspec.Struct, frozen=True):
    """The result of one probe. A probe may report facts several times, so a failed one can have facts too."""

    probe: str
    seconds: float
    facts: Facts | None = None
    problem: str | None = None  # None: it succeeded


async def run_probe(name: str, target: str, limit_s: float) -> Finding:
    """Run ``target`` ("module:function", which returns facts, or yields more complete ones).

    Never raises because of the probe. Cancelling ends the probe and its children.
    """
    start_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *_CHILD,
        target,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # so that its own children can be ended with it
        env=_environment(),
    )
    assert process.stdout is not None and process.stderr is not None, "both are pipes"
    out, err = bytearray(), bytearray()
    problem: str | None = None
    try:
        async with asyncio.timeout(limit_s):
            await asyncio.gather(_drain(process.stdout, out), _drain(process.stderr, err), process.wait())
    except TimeoutError:
        problem = f"did not end within {limit_s:g} s and was stopped"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _REAP_S)
    facts, unreadable = _decode(bytes(out))
    if problem is None and process.returncode:
        problem = _describe_exit(process.returncode, err.decode(errors="replace"))
    return Finding(name, round(time.monotonic() - start_s, 3), facts, problem or unreadable)


async def _drain(stream: asyncio.StreamReader, into: bytearray) -> None:
    while data := await stream.read(1 << 16):
        into += data[: _MAX_OUTPUT_BYTES - len(into)]


def _decode(out: bytes) -> tuple[Facts | None, str | None]:
    """The last facts among the lines, or what is wrong with the output."""
    lines = [line for line in out.split(b"\n")[:-1] if line]
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError):  # also raised for JSON that is no facts
            return msgspec.json.decode(line, type=Facts), None
    if not out:
        return None, "ended without output"
    return None, f"printed unreadable output: {out[:60].decode(errors='replace')!r}"


def _describe_exit(code: int, err: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    error = _last_error(err.splitlines())
    return f"failed: {error}" if error else f"exited with code {code}"


def _last_error(lines: list[str]) -> str:
    """The error at the end of a traceback, whose message may have several lines; otherwise the last line."""
    start = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=len(lines) - 2) + 1
    return " ".join(" ".join(lines[start:]).split())[:_MAX_ERROR_CHARS]


def _environment() -> dict[str, str]:
    """The probe runs this same code, even if it is not installed."""
    source = str(Path(tightwire.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _run_as_child(target: str) -> None:
    """Run the probe. Output of libraries goes to stderr, so that stdout has only facts."""
    die_with_parent()
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        module, function = target.split(":")
        result = getattr(importlib.import_module(module), function)()
        for facts in result if isinstance(result, Iterator) else [result]:
            out.write(msgspec.json.encode(facts) + b"\n")


if __name__ == "__main__":
    _run_as_child(sys.argv[1])
    os._exit(0)  # skip the threads and destructors of libraries
