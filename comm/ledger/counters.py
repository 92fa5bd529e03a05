"""Counters of collectives by (op, algorithm, phase): calls, bytes, seconds, and quantiles of the newest calls."""

from collections.abc import Sequence
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
        return self._replace(
            calls=self.calls - before.calls,
            bytes_sent=self.bytes_sent - before.bytes_sent,
            exact_bytes=self.exact_bytes - before.exact_bytes,
            seconds=self.seconds - before.seconds,
            message_bytes=self.message_bytes - before.message_bytes,
            codec_seconds=None if self.codec_seconds is None else self.codec_seconds - (before.codec_seconds or 0.0),
        )


class Latency(NamedTuple):
    """Median and 99th percentile of the newest calls (512 at most) of one (op, algorithm, phase)."""

    op: str
    algorithm: str
    phase: str
    p50_us: float
    p99_us: float


@dataclass(slots=True)
class Totals:
    """Totals of one kind. ``recent_s`` is a ring: a call writes entry ``calls % NUM_RECENT``."""

    calls: int = 0
    bytes_sent: int = 0
    exact_bytes: int = 0
    message_bytes: int = 0
    seconds: float = 0.0
    coding_s: float | None = 0.0
    recent_s: list[float] = field(default_factory=lambda: [0.0] * NUM_RECENT)
    first_timed: int = 0  # the first call that counts for latencies

    def add_calls(self, seconds: Sequence[float]) -> None:
        """Count calls with these times; the caller adds their bytes."""
        newest = seconds[-NUM_RECENT:]
        self.calls += len(seconds)
        self.seconds += sum(seconds)
        at = (self.calls - len(newest)) % NUM_RECENT
        before_end = min(len(newest), NUM_RECENT - at)
        self.recent_s[at : at + before_end] = newest[:before_end]
        self.recent_s[: len(newest) - before_end] = newest[before_end:]

    def add_bytes(self, bytes_sent: int, exact_bytes: int, message_bytes: int) -> None:
        self.bytes_sent += bytes_sent
        self.exact_bytes += exact_bytes
        self.message_bytes += message_bytes

    def quantiles_s(self, *shares: float) -> list[float]:
        """For each of ``shares``, the quantile of the newest calls' times; empty when there are none."""
        end, num = self.calls, min(self.calls - self.first_timed, NUM_RECENT)
        recent_s = sorted(self.recent_s[call % NUM_RECENT] for call in range(end - num, end))
        return [recent_s[int(num * share)] for share in shares] if num else []


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
        quantiles = [(kind, totals.quantiles_s(0.5, 0.99)) for kind, totals in list(self._totals.items())]
        return [Latency(*kind, *(seconds * 1e6 for seconds in found)) for kind, found in quantiles if found]

    def forget_latencies(self) -> None:
        """Restart the quantiles with later calls; the totals continue."""
        for totals in list(self._totals.values()):
            totals.first_timed = totals.calls
