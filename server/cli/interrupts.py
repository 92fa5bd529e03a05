"""Makes Ctrl-C end the process at once during start-up."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process silently, as SIGTERM does; the kernel ends its ranks with it.

    For use around imports: a KeyboardInterrupt inside one prints a traceback or, in a callback of the import system's
    locks, is swallowed, and the program continues. Main thread only.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
