"""Records a rank's collectives for the requested time and sends them to the parent in parts.

Runs in the reporter's thread, so a rank that computes, waits or hangs is recorded too, and the thread that runs
collectives is not involved.
"""

from collections.abc import Callable

from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.ledger.recording import Event, clock_name
from tightwire.server.ipc.messages import Record, Recorded

_EVENTS_PER_PART = 4096  # about a millisecond to encode, during which the rank's other threads wait


class Recorder:
    """One recording at a time; call ``pump`` regularly, and at ``end_s``."""

    def __init__(self, rank: int, send: Callable[[Recorded], None]) -> None:
        self._rank, self._send = rank, send
        self._request: Record | None = None
        self._ledger = Ledger()
        self.end_s: float | None = None  # when the current recording ends, on the caller's clock

    def start(self, request: Record, ledger: Ledger, now_s: float) -> None:
        """Begin this recording; discards the current one."""
        self._ledger.recording.stop()
        self._request, self._ledger, self.end_s = request, ledger, now_s + request.seconds
        ledger.recording.start()

    def pump(self, now_s: float) -> None:
        """Send what has been recorded; at the end of the time, the last part."""
        if self._request is None or self.end_s is None:
            return
        if now_s < self.end_s:
            while events := self._ledger.recording.take(_EVENTS_PER_PART):
                self._send_part(self._request, events)
            return
        rest = self._ledger.recording.stop()
        for start in range(0, len(rest), _EVENTS_PER_PART):
            self._send_part(self._request, rest[start : start + _EVENTS_PER_PART])
        self._send_part(self._request, [], last=True)
        self._request = self.end_s = None

    def _send_part(self, request: Record, events: list[Event], last: bool = False) -> None:
        self._send(Recorded(rank=self._rank, id=request.id, events=events, clock=clock_name(), last=last))
