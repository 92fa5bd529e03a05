"""Records the order of work on buffers: begin and end of the work itself, independently of the waits.

Tests check the order (YaFSDP's four conditions), so they detect a missing wait. On CUDA the times are those at which work was
queued; CUDA events of the buffers order the streams.
"""

import threading
import time
from collections import deque
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
    """Events of all threads of one rank; the oldest are dropped. Cost: about a microsecond an event."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._lock = threading.Lock()

    def begin(self, kind: str, bucket: str, buffer: str) -> None:
        self._note(kind, True, bucket, buffer)

    def end(self, kind: str, bucket: str, buffer: str) -> None:
        self._note(kind, False, bucket, buffer)

    @contextmanager
    def span(self, kind: str, bucket: str, buffer: str):
        self.begin(kind, bucket, buffer)
        yield
        self.end(kind, bucket, buffer)

    def take(self) -> list[Event]:
        """All events since the last ``take``, in order."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def _note(self, kind: str, begins: bool, bucket: str, buffer: str) -> None:
        with self._lock:
            self._events.append(Event(time.perf_counter(), kind, begins, bucket, buffer))


class _NoTrace(Trace):
    """Records nothing."""

    def _note(self, kind: str, begins: bool, bucket: str, buffer: str) -> None:
        pass


NO_TRACE = _NoTrace()
