"""Ends a child process when its parent dies, hands it to another parent, and ends a parent of several hosts that stays stopped; reads /proc of both.

Three functions say what the signals of terminals and service managers do: nothing in a child, a clean-up before they end a parent, and a note for
what ends by itself.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_LIBC = ctypes.CDLL(None)  # loaded here: code between fork and exec must not load libraries
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 0.5


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signal_number`` (0: none) when the thread that started this process ends. Usable as a ``preexec_fn``."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans(adopts: bool) -> None:
    """Have the kernel make this process the parent of processes whose own parent, a child of this one, ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


def await_adoption(parent: int, adoptive: int) -> bool:
    """Wait for the end of ``parent``; then end with ``adoptive``. False: another process is the parent now."""
    while os.getppid() == parent:
        time.sleep(0.001)
    die_with_parent()
    return os.getppid() == adoptive


def ignore_terminal_signals() -> None:
    """Ignore the signals that terminals and service managers send to every process: the parent ends its children."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_signals() -> tuple[int, ...]:
    """The signals that ask this process to end: SIGHUP (its terminal closed) too, unless `nohup` has it ignored."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGINT, signal.SIGTERM, *hangup


def clean_up_at_signals(clean_up: Callable[[], None]) -> None:
    """Call ``clean_up`` when one of ``end_signals`` is about to end this process. Valid until another handler is set. Main thread only."""

    def end(number: int, frame: object) -> None:  # raises nothing: during imports an exception may be lost
        clean_up()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in end_signals():
        signal.signal(number, end)


def die_at_end_of_stdin() -> None:
    """Block until the parent's end of standard input closes, then exit at once."""
    # The descriptor itself: a thread inside a buffered reader makes Python abort when the process ends.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def end_stopped_parent(pid: int, after_s: float) -> None:
    """Block until SIGSTOP has stopped the parent ``pid`` for ``after_s``, then kill it, and with it all its ranks.

    A stopped process cannot end by itself, and its ranks would wait forever for the other hosts, which have ended by then.
    """
    stopped_s, before = 0.0, time.monotonic()
    while stopped_s < after_s:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        # If this process was stopped too, the time counts little: both continue together.
        stopped_s = stopped_s + min(now - before, 2 * _LOOK_S) if state_of(pid) == "T" else 0.0
        before = now
    sys.stderr.write(
        f"tightwire serve: this server (pid {pid}) has been stopped (SIGSTOP) for {stopped_s:.0f} s. The other hosts end "
        "without it, so its ranks end it\n"
    )
    os.kill(pid, signal.SIGKILL)


def state_of(pid: int) -> str:
    """The letter of /proc: T is stopped by a signal, t by a debugger. Empty: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def process_age_s() -> float:
    """Seconds since this process started, imports included."""
    stat = Path("/proc/self/stat").read_text()
    start_ticks = int(stat.rpartition(")")[2].split()[19])  # field 22; the name before it may hold spaces
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Inside ``with``, the function returns the number of the first SIGINT or SIGTERM after its first call, or 0.

    The second ends the process, and so does one before that call: until then there is nothing to save.
    """
    received, before = 0, dict[int, Any]()

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = number
        die_with_parent(0)  # the kernel sends a signal for each thread of the parent
        signal.signal(number, signal.SIG_DFL)

    def look() -> int:
        if not before:
            before.update({number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)})
        return received

    try:
        yield look
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
