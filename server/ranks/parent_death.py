"""Ends a child process when its parent dies."""

import ctypes
import os
import signal
import sys

_LIBC = ctypes.CDLL(None)  # loaded here: code between fork and exec must not load libraries
_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signal_number`` when the thread that started this process ends. Usable as a ``preexec_fn``."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number)


def ignore_terminal_signals() -> None:
    """Ignore the signals that terminals and service managers send to every process: the parent ends its children."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def die_at_end_of_stdin() -> None:
    """Block until the parent's end of standard input closes, then exit at once."""
    # The descriptor itself: a thread inside a buffered reader makes Python abort when the process ends.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
