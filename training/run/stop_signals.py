"""Records Ctrl-C and SIGTERM, so that the loop stops after the current step; a second signal ends the process."""

import signal
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context manager for the main thread. ``number`` is the signal received inside ``with``, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self._before = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)
