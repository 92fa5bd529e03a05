"""Programs that measure memory: each case runs in a child, so none counts what another left."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_BEFORE = """
import json, os, sys, torch
from pathlib import Path

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def peak_from_here():
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")
"""
_AFTER = """
torch.set_num_threads(1)
for case in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        measure(*case)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""


def measure_each(measure: str, cases: Sequence[Sequence[str]], **environment: str) -> list[Any]:
    """What the function ``measure`` of this program prints for each case, as JSON.

    The program may call ``status(key)``, bytes of /proc/self/status, and ``peak_from_here()``, after which VmHWM is the peak from
    there; it returns the memory in use.
    """
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + measure + _AFTER, json.dumps(cases)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
