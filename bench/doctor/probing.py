"""Runs a probe in a process of its own, for so long and no longer, and says what became of it.

A driver that hangs, a library that crashes and a tool that prints nonsense end their process, not the doctor's.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

import tightwire
from tightwire.bench.doctor.facts import Facts

_MAX_OUTPUT_BYTES = 1 << 20
_MAX_WORDS = 400  # characters of an error: CUDA's come with advice of their own
_REAP_S = 2.0  # for a killed process to be gone; one in the kernel's hands may take longer, and is left to it
_CHILD = (sys.executable, "-m", "tightwire.bench.doctor.child")


class Finding(msgspec.Struct, frozen=True):
    """What came of one probe. A probe tells what it knows as it goes, so one that was ended may have facts too."""

    probe: str
    seconds: float
    facts: Facts | None = None
    problem: str | None = None  # None: it ended well


async def run_probe(name: str, target: str, limit_s: float) -> Finding:
    """Run ``target`` ("module:function", which returns facts, or yields them as it learns more).

    Never raises for what the probe does; ended with its children when cancelled.
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
    assert process.stdout is not None and process.stderr is not None, "both were asked for"
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
    facts, garbled = _decode(bytes(out))
    if problem is None and process.returncode:
        problem = _describe_exit(process.returncode, err.decode(errors="replace"))
    return Finding(name, round(time.monotonic() - start_s, 3), facts, problem or garbled)


async def _drain(stream: asyncio.StreamReader, into: bytearray) -> None:
    while data := await stream.read(1 << 16):
        into += data[: _MAX_OUTPUT_BYTES - len(into)]


def _decode(out: bytes) -> tuple[Facts | None, str | None]:
    """The newest facts among the lines, and what is wrong with the output if there are none."""
    lines = [line for line in out.split(b"\n")[:-1] if line]
    for line in reversed(lines):
        with contextlib.suppress(msgspec.DecodeError):  # and its subclass for what is JSON but no facts
            return msgspec.json.decode(line, type=Facts), None
    if not out:
        return None, "ended without a word"
    return None, f"said what cannot be understood: {out[:60].decode(errors='replace')!r}"


def _describe_exit(code: int, err: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    words = _last_words(err.splitlines())
    return f"failed: {words}" if words else f"exited with code {code}"


def _last_words(lines: list[str]) -> str:
    """The error that ends a traceback, whose message may have several lines; else the last line."""
    start = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=len(lines) - 2) + 1
    return " ".join(" ".join(lines[start:]).split())[:_MAX_WORDS]


def _environment() -> dict[str, str]:
    """The probe runs this very code, also where it was never installed."""
    source = str(Path(tightwire.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
