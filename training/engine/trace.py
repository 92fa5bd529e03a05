"""Records the order of work on buffers, and checks that the order is right.

Events mark the begin and end of the work itself, independently of the waits, so ``check_trace`` detects a missing wait.

    C1  computing with a unit's weights begins after their gather into that buffer has ended
    C2  a gather into a buffer begins after computing with its previous content has ended
    C3  backward writes into a gradient buffer after the reduce of its previous content has ended
    C4  a reduce begins after backward has written all of the unit's gradients

On CUDA the times are those at which work was queued; CUDA events of the buffers order the streams.
Source: YaFSDP's four conditions (github.com/yandex/YaFSDP).
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import contextmanager
from typing import NamedTuple

_MAX_EVENTS = 1 << 18


class OrderError(RuntimeError):
    """A trace breaks one of C1 to C4: a bug, and the results may be wrong."""


class Event(NamedTuple):
    """``kind``: gather, compute, write or reduce; ``buffer``: such as ``weights 0`` or ``gradients embedding``."""

    at_s: float  # perf_counter
    kind: str
    begins: bool
    unit: str
    buffer: str


class Trace:
    """Events of all threads of one rank; the oldest are dropped. Cost: about a microsecond an event."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._lock = threading.Lock()

    def begin(self, kind: str, unit: str, buffer: str) -> None:
        self._note(kind, True, unit, buffer)

    def end(self, kind: str, unit: str, buffer: str) -> None:
        self._note(kind, False, unit, buffer)

    @contextmanager
    def span(self, kind: str, unit: str, buffer: str):
        self.begin(kind, unit, buffer)
        yield
        self.end(kind, unit, buffer)

    def take(self) -> list[Event]:
        """All events since the last ``take``, in order."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def _note(self, kind: str, begins: bool, unit: str, buffer: str) -> None:
        with self._lock:
            self._events.append(Event(time.perf_counter(), kind, begins, unit, buffer))


class _NoTrace(Trace):
    """Records nothing."""

    def _note(self, kind: str, begins: bool, unit: str, buffer: str) -> None:
        pass


NO_TRACE = _NoTrace()


def check_trace(events: Iterable[Event]) -> None:
    """Check that C1 to C4 hold in a trace that begins with empty buffers.

    Raises:
        OrderError: one does not; the message names it, the unit and the buffer.
    """
    states: dict[str, tuple[str, str]] = {}  # by buffer: the unit in it and its last event
    for event in events:
        unit, last = states.get(event.buffer, ("", "empty"))
        word = event.kind if event.begins else f"{event.kind} ended"
        condition, unit_stays, allowed = _RULES[word]
        if last not in allowed or (unit_stays and unit != event.unit):
            raise OrderError(
                f"{condition}: {word} of {event.unit} in buffer {event.buffer}, where {unit or 'nobody'} had come to "
                f"{last!r}; there is a wait missing"
            )
        states[event.buffer] = (event.unit, word)


# By event: the condition it breaks out of order, whether the buffer must already hold its unit, allowed last events.
_RULES = {
    "gather": ("C2", False, ("empty", "gather ended", "compute ended")),
    "gather ended": ("C2", True, ("gather",)),
    "compute": ("C1", True, ("gather ended", "compute ended")),
    "compute ended": ("C2", True, ("compute",)),
    "write": ("C3", False, ("empty", "reduce ended")),
    "write ended": ("C3", True, ("write",)),
    "reduce": ("C4", True, ("write ended",)),
    "reduce ended": ("C3", True, ("reduce",)),
}
