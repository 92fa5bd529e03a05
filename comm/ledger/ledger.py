"""Records the collectives of one rank of one group: counters by (op, algorithm, phase), the running one, a recording.

It costs 0.5 us a collective. The thread that runs the collectives writes; a thread that overlaps them with its own work
calls ``hide``; any thread may read, start or stop a recording. On CUDA times are those to enqueue.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from tightwire.comm.ledger.recording import Begun, Recording, Series, finished_event

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
    message_bytes: int  # bytes of the input tensors
    codec_seconds: float | None = 0.0  # the part that encodes and decodes; not known in a fused kernel

    def since(self, before: "Count | None") -> "Count":
        """The increase of these totals since ``before``, or since the start."""
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
    """Totals of one kind, and the times of its newest calls, which any thread may copy while a call is appended."""

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
        self._totals: defaultdict[Kind, Totals] = defaultdict(Totals)

    def of(self, kind: Kind) -> Totals:
        """The totals of ``kind``, to add to."""
        return self._totals[kind]

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


_NO_CODING = nullcontext()
GATHERING = "weights"  # the phase of partitioned layers, which are gathered beside steps


class Spent(NamedTuple):
    """Time spent waiting for collectives since start."""

    seconds: float = 0.0
    codec_seconds: float = 0.0  # the part known to be encoding and decoding
    num_unsplit: int = 0  # calls that encode inside a fused kernel, whose time is in ``seconds`` only


class _CodingTimer:
    __slots__ = ("_ledger", "_start_s")

    def __init__(self, ledger: "Ledger") -> None:
        self._ledger, self._start_s = ledger, 0.0

    def __enter__(self) -> None:
        self._start_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._ledger.coding_s += perf_counter() - self._start_s


class Ledger:
    """The record of one rank's collectives. A quantized one encodes and decodes inside ``with ledger.coding``, or calls ``hide_coding``."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.waited_s = 0.0  # by callers of ``Pending.wait``
        self.recording = Recording(lambda: (self._series, self._current))
        self.coding = _CodingTimer(self)
        self.coding_s = 0.0  # time that the running collective has spent coding
        self._hides_coding = False  # whether the running collective encodes inside a fused kernel
        self._spent_s = self._spent_coding_s = 0.0
        self._hidden_s = self._hidden_coding_s = 0.0  # the part of these that overlapped with computing
        self._num_unsplit = 0
        self._number = 0
        self._current: Begun | None = None
        self._last: Begun | None = None
        self._series: Series | None = None  # the series that a kernel runs now

    def begin(self, op: str, algorithm: str, num_bytes: int, phase: str = "", site: str = "") -> None:
        """Start a collective over a tensor of ``num_bytes``. A collective that fails is not ended and stays ``current``.

        Counters are kept for each ``phase``, such as "decode"; ``site``, such as "o_proj 3", is for a recording.
        """
        self._number = number = self._number + 1
        self._current = (op, algorithm, num_bytes, number, perf_counter(), phase, site)

    def end(self, bytes_sent: int, exact_bytes: int | None = None) -> None:
        """End the collective that began last; ``exact_bytes`` are those it would have sent unquantized, None if it is exact."""
        begun = self._current
        assert begun is not None, "end() without begin()"
        op, algorithm, num_bytes, _, start_s, phase, _ = begun
        seconds = perf_counter() - start_s
        totals = self.counters.of((op, algorithm, phase))
        totals.recent_s.append(seconds)
        totals.seconds += seconds
        totals.add(1, bytes_sent, bytes_sent if exact_bytes is None else exact_bytes, num_bytes)
        self._spent_s += seconds
        if self.coding_s or self._hides_coding:
            self._end_coding(totals)
        self._last, self._current = begun, None
        events = self.recording.events
        if events is not None:
            events.append(finished_event(begun, seconds, bytes_sent, exact_bytes))

    def begin_series(self, series: Series) -> None:
        """Start collectives that a kernel runs; ``number``, ``begun`` and ``current`` read its progress."""
        self._series = series

    def end_series(self) -> int:
        """Count the collectives of the kernel that has returned; return the bytes that this rank sent."""
        series = self._series
        assert series is not None, "end_series() without begin_series()"
        seconds = series.seconds()
        bytes_sent = len(seconds) * series.bytes_sent
        if seconds:
            totals = self.counters.of((series.op, series.algorithm, series.phase))
            totals.add(len(seconds), bytes_sent, bytes_sent, len(seconds) * series.num_bytes)
            totals.seconds += sum(seconds)
            totals.recent_s.extend(seconds)
            self._spent_s += sum(seconds)
        self._last, self._current = self._last_ended(), series.current
        self._number = series.first_number + series.num_begun
        self._series = None
        self.recording.add_series(series)
        return bytes_sent

    def _last_ended(self) -> Begun | None:
        series = self._series
        return self._last if series is None or not series.num_done else series.nth(series.num_done - 1)

    def add_replayed(self, counts: Iterable[Count]) -> None:
        """Count the collectives of a replayed CUDA graph. Their times are unknown, and they are not recorded."""
        for count in counts:
            if count.calls:
                totals = self.counters.of(count[:3])
                totals.add(count.calls, count.bytes_sent, count.exact_bytes, count.message_bytes)
                self._number += count.calls

    def coding_if(self, coded: bool) -> AbstractContextManager[None]:
        """``coding`` for a codec that encodes, nothing for an exact one."""
        return self.coding if coded else _NO_CODING

    def hide_coding(self) -> None:
        """Mark the coding time of the running collective as unknown: it encodes inside a fused kernel."""
        self._hides_coding = True

    def _end_coding(self, totals: Totals) -> None:
        self._spent_coding_s += self.coding_s
        self._num_unsplit += self._hides_coding
        if self._hides_coding or totals.coding_s is None:
            totals.coding_s = None
        else:
            totals.coding_s += self.coding_s
        self.coding_s, self._hides_coding = 0.0, False

    def spent(self) -> Spent:
        """Time spent in all kinds, less the hidden time. Unlike ``counts``, its cost does not grow with the number of kinds."""
        seconds, coding_s = self._spent_s - self._hidden_s, self._spent_coding_s - self._hidden_coding_s
        return Spent(seconds, coding_s, self._num_unsplit)

    def busy(self) -> tuple[float, float]:
        """Seconds in all collectives since start, and the part spent coding; hidden time included."""
        return self._spent_s, self._spent_coding_s

    def hide(self, seconds: float, coding_s: float) -> None:
        """Subtract time of collectives that overlapped with this rank's computing from ``spent``."""
        self._hidden_s += seconds
        self._hidden_coding_s += coding_s

    @property
    def number(self) -> int:
        """The number of collectives begun. Ranks run the same ones, so the rank with the lowest number is behind."""
        series = self._series
        return self._number if series is None else series.first_number + series.num_begun

    @property
    def begun(self) -> Begun | None:
        """The running collective; the same object while it runs outside a kernel."""
        series = self._series
        return self._current if series is None else series.current

    def current(self) -> str | None:
        """The running collective, such as ``all_reduce ring 1152 B, #523, 0.4 s``; or None between collectives."""
        begun = self.begun
        return None if begun is None else f"{_words(begun)}, {perf_counter() - begun[4]:.1f} s"

    def last(self) -> str | None:
        """The collective that ended last, or None before the first."""
        return None if (begun := self._last_ended()) is None else _words(begun)


def _words(begun: Begun) -> str:
    op, algorithm, num_bytes, number, *_ = begun
    return f"{op} {algorithm} {num_bytes} B, #{number}"
