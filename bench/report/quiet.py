"""How much of this machine others used: before a measurement, and while it ran (Linux).

A median hides a neighbour who worked all along; the kernel's own accounts do not.
"""

import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

_QUIET_SHARE = 0.1  # of the cores that others may use before it is worth a word


class OthersWatch:
    """Core seconds that nobody of ours used, from its making to ``share``.

    Ours are this process and all its descendants that have ended and been waited for, so ask when they have; and the
    processes ``pids``, as long as they run.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), self._ours_s()

    def share(self) -> float:
        """Of all cores, 0 to 1."""
        others_s = (_busy_s() - self._busy_s) - (self._ours_s() - self._own_s)
        cores = os.cpu_count() or 1
        return min(1.0, max(0.0, others_s / (cores * (time.monotonic() - self._began))))

    def _ours_s(self) -> float:
        return _own_s() + sum(map(_process_s, self._pids))


def wait_for_quiet(below: float, timeout_s: float) -> float:
    """Sleep until others use less than ``below`` of the cores; returns how much they used at last."""
    deadline = time.monotonic() + timeout_s
    while True:
        watch = OthersWatch()
        time.sleep(3.0 if timeout_s else 1.0)
        share = watch.share()
        if share < below or time.monotonic() >= deadline:
            return share


def show_others(console: Console, result: Mapping[str, Any]) -> None:
    """Why to read the figures with care, if at all."""
    if result.get("others_share", 0.0) > _QUIET_SHARE:
        console.print(f"note: {_describe(result)}; times are too long by that\n", style="yellow", soft_wrap=True)


def quiet_facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line of a page; none of a run that was cut short."""
    return [("quiet", _describe(result))] if "others_share" in result else []


def _busy_s() -> float:
    """Seconds that all cores together have worked since boot; iowait is idle, guest time is within user time."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _process_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _describe(result: Mapping[str, Any]) -> str:
    return f"others used {result['others_share']:.0%} of this machine's cores while it was measured"
