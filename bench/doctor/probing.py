"""Runs a program with a time limit. A hanging driver or a crashing library ends its own process, not the doctor's."""

import contextlib
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_MAX_ERROR_CHARS = 400  # CUDA's errors include long advice
_REAP_S = 2.0  # to wait for a killed process; one that hangs inside the kernel is left behind


@dataclass(kw_only=True, slots=True)
class Output:
    """The output on stdout and when each piece of it arrived. ``problem`` is None if the program succeeded."""

    data: bytes = b""
    times_s: list[float] = field(default_factory=list)
    problem: str | None = None


def run_probe(command: Sequence[str], limit_s: float) -> Output:
    """Run ``command``; never raises because of it, and leaves no process of its session behind."""
    output, deadline = Output(), time.monotonic() + limit_s
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            )
        except OSError as error:
            return Output(problem=f"failed: {error}")
        assert process.stdout is not None, "it is a pipe"
        try:
            with process.stdout as pipe:
                while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    if not (data := os.read(pipe.fileno(), 1 << 16)):
                        break
                    output.data += data
                    output.times_s.append(time.monotonic())
                else:
                    output.problem = f"did not end within {limit_s:g} s and was stopped"
            if output.problem is None:
                process.wait(_REAP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_S)
        errors.seek(0)
        if output.problem is None and process.returncode:
            output.problem = _describe_exit(process.returncode, errors.read().decode(errors="replace"))
    return output


def _describe_exit(code: int, errors: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    # The message at the end of a traceback, whose frames are indented, or all lines of another program.
    message = " ".join(re.split(r"(?m)^  .*$", errors)[-1].split())[:_MAX_ERROR_CHARS]
    return f"failed: {message}" if message else f"exited with code {code}"
