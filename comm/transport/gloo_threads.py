"""Gloo's socket threads, kept from taking the core of the thread that sends.

For each event on a connection gloo's loop thread tries to take the connection's lock, and where the sending thread holds
it asks the kernel for the same events again, at once. Where both share a core, an arriving message wakes the loop thread,
which preempts the holder of that lock and then spins until the next timer tick: 4 ms at 250 Hz, for messages that take
0.1 ms. A batch task preempts nobody when it wakes, and is otherwise like any other.

Measured with two ranks, each bound to one of two cores, exchanging 1 KiB to 288 KiB over the loopback interface: median
3.9 ms, with batch threads 0.15 to 0.3 ms; not bound, 0.3 to 3.5 ms against 0.2 to 0.45.
"""

import contextlib
import os
from pathlib import Path

_LOOP = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


def make_loop_threads_batch() -> None:
    """Of this process, all that gloo has started so far. Does nothing where the kernel knows no batch tasks."""
    if not hasattr(os, "SCHED_BATCH") or not _TASKS.is_dir():
        return
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or a sandbox forbids it: then messages are slower
            number = int(task.name)
            # What was made to give way even more, such as by `chrt --idle`, stays so.
            if (task / "comm").read_text().strip() == _LOOP and os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
