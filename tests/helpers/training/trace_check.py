"""Records the work on an engine's buffers, and checks that it is in a right order.

    C1  computing with a bucket's weights begins after their gather into that buffer has ended
    C2  a gather into a buffer begins after computing with its previous content has ended
    C3  backward writes into a gradient buffer after the reduce of its previous content has ended
    C4  a reduce begins after backward has written all of the bucket's gradients

Source: YaFSDP's four conditions (github.com/yandex/YaFSDP).
"""

import time
from collections.abc import Iterable
from typing import NamedTuple


class Event(NamedTuple):
    """``kind``: gather, compute, write or reduce; ``buffer``: such as ``weights 0`` or ``gradients embedding``."""

    at_s: float  # perf_counter
    kind: str
    begins: bool
    bucket: str
    buffer: str


class Trace:
    """Events of all threads of one rank. On CUDA the times are those at which work was queued."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, kind: str, begins: bool, bucket: str, buffer: str) -> None:
        self.events.append(Event(time.perf_counter(), kind, begins, bucket, buffer))


class OrderError(RuntimeError):
    """A trace breaks one of C1 to C4."""


def check_trace(events: Iterable[Event]) -> None:
    """Check that C1 to C4 hold in a trace that begins with empty buffers.

    Raises:
        OrderError: one does not; the message names it, the bucket and the buffer.
    """
    states: dict[str, tuple[str, str]] = {}  # by buffer: the bucket in it and its last event
    for event in events:
        bucket, last = states.get(event.buffer, ("", "empty"))
        word = event.kind if event.begins else f"{event.kind} ended"
        condition, bucket_stays, allowed = _RULES[word]
        if last not in allowed or (bucket_stays and bucket != event.bucket):
            raise OrderError(
                f"{condition}: {word} of {event.bucket} in buffer {event.buffer}, where the last event was {last!r} of "
                f"{bucket or 'nothing'}; a wait is missing"
            )
        states[event.buffer] = (event.bucket, word)


# By event: the condition it breaks out of order, whether the buffer must already hold its bucket, allowed last events.
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
