"""A rank's side of a recording: its collectives go to the parent in parts, for as long as was asked.

Driven by the reporter's own thread, so that a rank that computes, waits or hangs is recorded all the same, and the
thread that runs the collectives is not asked for anything.
"""

from collections.abc import Callable

from tightwire.comm.ledger.ledger import Event, Ledger
from tightwire.comm.ledger.trace import clock_name
from tightwire.server.ipc.messages import Record, Recorded

_EVENTS_PER_PART = 4096  # about a millisecond to encode, in which the rank's other threads stand still


class Recorder:
    """One recording at a time; ``pump`` must be called now and then, and when ``end_s`` has come."""

    def __init__(self, rank: int, send: Callable[[Recorded], None]) -> None:
        self._rank, self._send = rank, send
        self._request: Record | None = None
        self._ledger = Ledger()
        self.end_s: float | None = None  # when the recording under way ends, on the caller's clock

    def start(self, request: Record, ledger: Ledger, now_s: float) -> None:
        """Forget a recording that is under way, and begin this one."""
        self._ledger.stop_recording()
        self._request, self._ledger, self.end_s = request, ledger, now_s + request.seconds
        ledger.start_recording()

    def pump(self, now_s: float) -> None:
        """Send what has been recorded; all of it, and the last part, when the time is over."""
        if self._request is None or self.end_s is None:
            return
        if now_s < self.end_s:
            while events := self._ledger.take_events(_EVENTS_PER_PART):
                self._send_part(self._request, events)
            return
        rest = self._ledger.stop_recording()
        for start in range(0, len(rest), _EVENTS_PER_PART):
            self._send_part(self._request, rest[start : start + _EVENTS_PER_PART])
        self._send_part(self._request, [], last=True)
        self._request = self.end_s = None

    def _send_part(self, request: Record, events: list[Event], last: bool = False) -> None:
        self._send(Recorded(rank=self._rank, id=request.id, events=events, clock=clock_name(), last=last))
