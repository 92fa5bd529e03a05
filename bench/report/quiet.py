"""Measures how much of the CPU other processes used before and during a measurement, which no median shows (Linux)."""

import os
import resource
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

QUIET_SHARE = 0.1  # of the cores; results of a busier machine carry a note


class OthersWatch:
    """CPU time of other processes, from construction to ``share``.

    Our own processes are this one, its descendants that have ended and been waited for (so call ``share`` after that), those of
    multiprocessing's fork server too, and the processes ``pids`` while they run.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = pids
        self._began = time.monotonic()
        self._busy_s, self._own_s = _busy_s(), self._ours_s()

    def share(self) -> float:
        """The share of all cores that other processes used, 0 to 1."""
        others_s = (_busy_s() - self._busy_s) - (self._ours_s() - self._own_s)
        return min(1.0, max(0.0, others_s / ((os.cpu_count() or 1) * (time.monotonic() - self._began))))

    def _ours_s(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        pids = [*self._pids, *filter(None, [getattr(forkserver._forkserver, "_forkserver_pid", None)])]
        return sum(each.ru_utime + each.ru_stime for each in used) + sum(map(_process_s, pids))


def wait_for_quiet(timeout_s: float) -> None:
    """Sleep until others use less than ``QUIET_SHARE`` of the cores, at most ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        watch = OthersWatch()
        time.sleep(3.0)
        if watch.share() < QUIET_SHARE:
            return


def describe_others(share: float) -> str:
    return f"other programs used {share:.0%} of this machine's cores while it was measured"


def _busy_s() -> float:
    """Busy seconds of all cores since boot; iowait is idle, guest time is part of user time."""
    user, nice, system, _, _, irq, softirq, steal = (
        int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _process_s(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]  # with those of children that ended
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
