"""Records the order of work on buffers: begin and end of the work itself, independently of the waits.

Tests check the order (YaFSDP's four conditions), so they detect a missing wait. On CUDA the times are those at which work was
queued; CUDA events of the buffers order the streams.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_MAX_EVENTS = 1 << 18


class Event(NamedTuple):
    """``kind``: gather, compute, write or reduce; ``buffer``: such as ``weights 0`` or ``gradients embedding``."""

    at_s: float  # perf_counter
    kind: str
    begins: bool
    bucket: str
    buffer: str


class Trace:
    """Events of all threads of one rank; the oldest are dropped. Cost: about a microsecond an event, if enabled."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)

    def note(self, kind: str, begins: bool, bucket: str, buffer: str) -> None:
        if self._enabled:
            self.events.append(Event(time.perf_counter(), kind, begins, bucket, buffer))

    @contextmanager
    def span(self, kind: str, bucket: str, buffer: str) -> Iterator[None]:
        self.note(kind, True, bucket, buffer)
        yield
        self.note(kind, False, bucket, buffer)
