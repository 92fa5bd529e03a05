"""The response extra ``"tightwire": {"comm": true}``: what the ranks exchanged while one request lived."""

import time

import msgspec

from tightwire.comm.ledger.ledger import GATHERING, LOADING
from tightwire.server.api.responses import CommReport, CommSpan, CommTotals
from tightwire.server.ipc.engine_client import EngineClient
from tightwire.server.ipc.engine_stats import CommCount


class CommWatch:
    """Reads the engine's counters at the start, the first token and the end; differences are the report.

    Counters are those of whole steps, shared with every request that ran in them, and the report says so.
    """

    def __init__(self, engine: EngineClient, arrived_s: float) -> None:
        self._engine = engine
        self._start = _read(engine)
        self._start_s = arrived_s
        self._first = self._start
        self._first_s: float | None = None

    def saw_token(self) -> None:
        """Called for every token; the first one counts."""
        if self._first_s is None:
            self._first, self._first_s = _read(self._engine), time.monotonic()

    def report(self) -> CommReport:
        end, end_s = _read(self._engine), time.monotonic()
        first_s = end_s if self._first_s is None else self._first_s
        counters = [
            CommTotals(
                op=now.op,
                algorithm=now.algorithm,
                phase=now.phase,
                calls=now.calls - before.calls,
                bytes_sent=now.bytes_sent - before.bytes_sent,
                exact_bytes=now.exact_bytes - before.exact_bytes,
                seconds=now.seconds - before.seconds,
                message_bytes=now.message_bytes - before.message_bytes,
                codec_seconds=None if now.codec_seconds is None else now.codec_seconds - (before.codec_seconds or 0.0),
            )
            for key, now in end.items()
            if now.calls > (before := self._start.get(key, _zero(now))).calls
        ]
        bytes_sent = sum(counter.bytes_sent for counter in counters)
        exact_bytes = sum(counter.exact_bytes for counter in counters)
        return CommReport(
            ttft=_span(first_s - self._start_s, _seconds(self._first) - _seconds(self._start)),
            decode=_span(end_s - first_s, _seconds(end) - _seconds(self._first)),
            bytes_sent=bytes_sent,
            exact_bytes=exact_bytes,
            saved_bytes=exact_bytes - bytes_sent,
            counters=counters,
        )


def _read(engine: EngineClient) -> dict[tuple[str, str, str], CommCount]:
    stats = engine.stats
    return {(count.op, count.algorithm, count.phase): count for count in stats.comm} if stats else {}


def _zero(count: CommCount) -> CommCount:
    return msgspec.structs.replace(
        count, calls=0, bytes_sent=0, exact_bytes=0, seconds=0.0, message_bytes=0, codec_seconds=0.0
    )


def _seconds(counts: dict[tuple[str, str, str], CommCount]) -> float:
    """What steps waited for: layers are gathered beside them."""
    return sum(count.seconds for count in counts.values() if count.phase not in (LOADING, GATHERING))


def _span(seconds: float, comm_seconds: float) -> CommSpan:
    return CommSpan(
        seconds=seconds, comm_seconds=comm_seconds, comm_share=comm_seconds / seconds if seconds > 0 else 0.0
    )
