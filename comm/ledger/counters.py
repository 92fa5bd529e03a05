"""Counters of collectives by (op, algorithm, phase): calls, bytes, seconds, and quantiles of the newest calls."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

NUM_RECENT = 512  # calls whose times are kept

Kind = tuple[str, str, str]  # op, algorithm, phase


class Count(NamedTuple):
    """Totals since start of one (op, algorithm, phase); ``seconds`` includes waiting for slower ranks."""

    op: str
    algorithm: str
    phase: str
    calls: int
    bytes_sent: int
    exact_bytes: int  # sent by the exact algorithm of the same shape; equals bytes_sent for an exact algorithm
    seconds: float
    message_bytes: int  # of the input tensors
    codec_seconds: float | None = 0.0  # the part that encodes and decodes; None: unknown, in a fused kernel

    def since(self, before: "Count | None") -> "Count":
        """The increase of these totals since ``before`` (None: since the start)."""
        if before is None:
            return self
        sums = [(name, getattr(self, name), getattr(before, name) or 0) for name in self._fields[3:]]
        return self._replace(**{name: now - earlier for name, now, earlier in sums if now is not None})


class Latency(NamedTuple):
    """Median and 99th percentile of the newest calls (512 at most) of one (op, algorithm, phase)."""

    op: str
    algorithm: str
    phase: str
    p50_us: float
    p99_us: float


@dataclass(slots=True)
class Totals:
    """Totals of one kind. ``recent_s``: times of the newest calls; any thread may copy it while a call is appended."""

    calls: int = 0
    bytes_sent: int = 0
    exact_bytes: int = 0
    message_bytes: int = 0
    seconds: float = 0.0
    coding_s: float | None = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def add(self, calls: int, bytes_sent: int, exact_bytes: int, message_bytes: int) -> None:
        self.calls += calls
        self.bytes_sent += bytes_sent
        self.exact_bytes += exact_bytes
        self.message_bytes += message_bytes


class Counters:
    """The totals of one ledger. One thread adds; any thread may read."""

    def __init__(self) -> None:
        self._totals: dict[Kind, Totals] = {}

    def of(self, kind: Kind) -> Totals:
        """The totals of ``kind``, to add to."""
        totals = self._totals.get(kind)
        if totals is None:
            totals = self._totals[kind] = Totals()
        return totals

    def counts(self) -> list[Count]:
        """Totals so far, in order of first use."""
        return [
            Count(*kind, t.calls, t.bytes_sent, t.exact_bytes, t.seconds, t.message_bytes, t.coding_s)
            for kind, t in list(self._totals.items())
        ]

    def latencies(self) -> list[Latency]:
        """Quantiles of the newest calls of each kind. Sorts up to 512 numbers per kind, so do not call it in every step."""
        recent = [(kind, sorted(totals.recent_s.copy())) for kind, totals in list(self._totals.items())]
        return [
            Latency(*kind, *(1e6 * seconds[int(len(seconds) * share)] for share in (0.5, 0.99)))
            for kind, seconds in recent
            if seconds
        ]

    def forget_latencies(self) -> None:
        """Restart the quantiles with later calls; the totals continue."""
        for totals in list(self._totals.values()):
            totals.recent_s.clear()
