"""Whether this machine is quiet enough to measure on, from /proc/stat (Linux)."""

import time
from pathlib import Path


def busy_share(seconds: float = 1.0) -> float:
    """The share of all cores that somebody used during these seconds, 0 to 1, while the caller slept."""
    idle_before, total_before = _ticks()
    time.sleep(seconds)
    idle, total = _ticks()
    return 1.0 - (idle - idle_before) / max(1, total - total_before)


def wait_for_quiet(below: float, timeout_s: float) -> float:
    """Sleep until the machine has been quiet for three seconds; returns how busy it was at last."""
    deadline = time.monotonic() + timeout_s
    while True:
        busy = busy_share(3.0 if timeout_s else 1.0)
        if busy < below or time.monotonic() >= deadline:
            return busy


def _ticks() -> tuple[int, int]:
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)  # idle and iowait; guest time is already within user time
