"""Ctrl-C while there is nothing yet to end in good order."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process silently, as SIGTERM does, and its ranks with it (the kernel sees to that).

    For stretches of imports: a KeyboardInterrupt raised inside one prints a traceback or, in a callback of the import
    system's locks, is swallowed, and the program goes on as if nobody had pressed a key. Main thread only.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
