"""What every collective cost: counts by (op, algorithm, phase), and the one that runs now.

Cheap enough to stay on (about a microsecond per collective; tests/comm/test_ledger.py holds it to two). One thread, the
one that runs the collectives, writes; any thread may read.

On CUDA ``seconds`` is the time to enqueue the collective, because the host does not wait for the device.
"""

from time import perf_counter
from typing import NamedTuple


class Count(NamedTuple):
    """Totals since start of one (op, algorithm, phase); ``seconds`` includes waiting for slower ranks."""

    op: str
    algorithm: str
    phase: str
    calls: int
    bytes_sent: int
    exact_bytes: int  # what the exact algorithm of the same shape would have sent; bytes_sent itself when exact
    seconds: float

    def since(self, before: "Count | None") -> "Count":
        """What was added to these totals after ``before`` was read (None: after the start)."""
        if before is None:
            return self
        return self._replace(
            calls=self.calls - before.calls,
            bytes_sent=self.bytes_sent - before.bytes_sent,
            exact_bytes=self.exact_bytes - before.exact_bytes,
            seconds=self.seconds - before.seconds,
        )


class _Collective(NamedTuple):
    op: str
    algorithm: str
    num_bytes: int
    number: int
    started: float

    def __str__(self) -> str:
        return f"{self.op} {self.algorithm} {self.num_bytes} B, #{self.number}"


class _Totals:
    __slots__ = ("bytes_sent", "calls", "exact_bytes", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes_sent = 0
        self.exact_bytes = 0
        self.seconds = 0.0


class Ledger:
    """The collectives of one rank of one group. ``phase`` ("prefill", "decode", ...) is set by the caller per step."""

    def __init__(self) -> None:
        self.phase = ""
        self._totals: dict[tuple[str, str, str], _Totals] = {}
        self._number = 0
        self._current: _Collective | None = None
        self._last: _Collective | None = None

    def begin(self, op: str, algorithm: str, num_bytes: int) -> None:
        """A collective over a tensor of ``num_bytes`` starts. If it fails it is never ended, and stays ``current``."""
        self._number += 1
        self._current = _Collective(op, algorithm, num_bytes, self._number, perf_counter())

    def end(self, bytes_sent: int, exact_bytes: int | None = None) -> None:
        """The collective begun last is done; this rank sent ``bytes_sent`` to others for it.

        ``exact_bytes``: what it would have sent unquantized; None: it was exact.
        """
        collective = self._current
        assert collective is not None, "end() without begin()"
        key = (collective.op, collective.algorithm, self.phase)
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = _Totals()
        totals.calls += 1
        totals.bytes_sent += bytes_sent
        totals.exact_bytes += bytes_sent if exact_bytes is None else exact_bytes
        totals.seconds += perf_counter() - collective.started
        self._last = collective
        self._current = None

    def counts(self) -> list[Count]:
        """Totals so far, in order of first use."""
        return [Count(*key, t.calls, t.bytes_sent, t.exact_bytes, t.seconds) for key, t in list(self._totals.items())]

    def current(self) -> str | None:
        """The collective that runs now, such as ``all_reduce ring 1152 B, #523, 0.4 s``; None between collectives."""
        collective = self._current
        if collective is None:
            return None
        return f"{collective}, {perf_counter() - collective.started:.1f} s"

    def last(self) -> str | None:
        """The collective that was finished last; None before the first."""
        return None if self._last is None else str(self._last)
