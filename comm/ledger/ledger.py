"""Counts, bytes and times of collectives by (op, algorithm, phase); the running collective; and a recording of each.

Always on: it costs 0.5 us a collective. One thread, which runs the collectives, writes; a thread that overlaps them with its
own work calls ``hide``. Any thread may read, start or stop a recording.

On CUDA ``seconds`` and ``codec_seconds`` are the time to enqueue, because the host does not wait for the device.
"""

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

from tightwire.comm.ledger.series import NUM_RECENT, Series, Totals

GATHERING = "weights"  # the phase of partitioned layers, which are gathered beside steps

_MAX_EVENTS = 1 << 16  # in a recording: about 15 s of a small model's decoding, 20 MB


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
    codec_seconds: float | None = (
        0.0  # the part of ``seconds`` that encodes and decodes; None: unknown, in a fused kernel
    )

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


class Spent(NamedTuple):
    """Time spent waiting for collectives since start; ``codec_seconds`` is the part known to be encoding and decoding.

    ``num_unsplit``: calls that encode inside a fused kernel; their time is in ``seconds`` only.
    """

    seconds: float = 0.0
    codec_seconds: float = 0.0
    num_unsplit: int = 0


class Latency(NamedTuple):
    """Median and 99th percentile of the newest calls (512 at most) of one (op, algorithm, phase)."""

    op: str
    algorithm: str
    phase: str
    p50_us: float
    p99_us: float


class Event(NamedTuple):
    """One collective. ``start_s`` is on the clock of ``time.perf_counter``, which processes of a Linux host share."""

    op: str
    algorithm: str
    phase: str
    site: str  # the purpose of the sum, such as "o_proj 3"; empty when the caller does not set it
    number: int  # rises by one per collective of a rank; equal numbers on two ranks are the same collective
    message_bytes: int
    bytes_sent: int
    exact_bytes: int
    start_s: float
    seconds: float
    finished: bool = True


# Op, algorithm, message bytes, number, start; a plain tuple, because a NamedTuple takes twice as long.
Begun = tuple[str, str, int, int, float]


class _CodingTimer:
    __slots__ = ("_ledger", "_start_s")

    def __init__(self, ledger: "Ledger") -> None:
        self._ledger, self._start_s = ledger, 0.0

    def __enter__(self) -> None:
        self._start_s = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._ledger.coding_s += perf_counter() - self._start_s


class Ledger:
    """The collectives of one rank of one group.

    The caller sets ``phase`` ("prefill", "decode", ...) per step and may set ``site`` per collective. A quantized
    collective encodes and decodes inside ``with ledger.coding``, which must not be nested, or calls ``hide_coding``.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.site = ""
        self.coding = _CodingTimer(self)
        self.coding_s = 0.0  # of the running collective
        self._hidden = False  # whether the running collective encodes inside a fused kernel
        self._spent_s = self._all_coding_s = 0.0
        self._hidden_s = self._hidden_coding_s = 0.0  # the part of these that overlapped with computing
        self._num_unsplit = 0
        self._totals: dict[tuple[str, str, str], Totals] = {}
        self._number = 0
        self._current: Begun | None = None
        self._last: Begun | None = None
        self._series: Series | None = None  # the series that a kernel runs now
        self._events: deque[Event] | None = None
        self._recording_since_s = 0.0

    def begin(self, op: str, algorithm: str, num_bytes: int) -> None:
        """Start a collective over a tensor of ``num_bytes``. A collective that fails is not ended and stays ``current``."""
        self._number = number = self._number + 1
        self._current = (op, algorithm, num_bytes, number, perf_counter())

    def end(self, bytes_sent: int, exact_bytes: int | None = None) -> None:
        """End the collective that began last; this rank sent ``bytes_sent`` to others for it.

        ``exact_bytes``: the bytes it would have sent unquantized; None: the collective is exact.
        """
        begun = self._current
        assert begun is not None, "end() without begin()"
        op, algorithm, num_bytes, number, start_s = begun
        seconds = perf_counter() - start_s
        if exact_bytes is None:
            exact_bytes = bytes_sent
        key = (op, algorithm, self.phase)
        totals = self._totals_of(key)
        totals.recent_s[totals.calls % NUM_RECENT] = seconds
        totals.calls += 1
        totals.bytes_sent += bytes_sent
        totals.exact_bytes += exact_bytes
        totals.message_bytes += num_bytes
        totals.seconds += seconds
        self._spent_s += seconds
        if self.coding_s or self._hidden:
            self._end_coding(totals)
        self._last = begun
        self._current = None
        events = self._events
        if events is not None:
            events.append(
                Event(*key, self.site, number, num_bytes, bytes_sent, exact_bytes, start_s=start_s, seconds=seconds)
            )

    def begin_series(self, series: Series) -> None:
        """Start collectives that a kernel runs. ``number``, ``begun`` and ``current`` read its progress meanwhile."""
        self._series = series

    def end_series(self) -> int:
        """Count the collectives of the kernel that has returned; return the bytes that this rank sent for them.

        A collective that began but did not end stays ``current``. Cost: about 20 us for 60 of them, 60 us more in a recording.
        """
        series = self._series
        assert series is not None, "end_series() without begin_series()"
        seconds = series.seconds()
        bytes_sent = len(seconds) * series.bytes_sent
        if seconds:
            totals = self._totals_of((series.op, series.algorithm, self.phase))
            totals.add_calls(seconds)
            totals.bytes_sent += bytes_sent
            totals.exact_bytes += bytes_sent
            totals.message_bytes += len(seconds) * series.num_bytes
            self._spent_s += sum(seconds)
        self._last, self._current = self._last_of(series), series.current
        self._number = series.first_number + series.num_begun
        self._series = None
        events = self._events
        if events is not None:
            events.extend(self._events_of(series))
        return bytes_sent

    def _totals_of(self, key: tuple[str, str, str]) -> Totals:
        totals = self._totals.get(key)
        if totals is None:
            totals = self._totals[key] = Totals()
        return totals

    def _last_of(self, series: Series) -> Begun | None:
        return series.nth(series.num_done - 1) if series.num_done else self._last

    def _events_of(self, series: Series, after: int = 0) -> list[Event]:
        """The collectives of ``series`` that ended in the recording and have a number above ``after``."""
        key, since_s, sent = (series.op, series.algorithm, self.phase), self._recording_since_s, series.bytes_sent
        spans = zip(series.sites, series.starts_s(), series.seconds(), strict=False)
        return [
            Event(*key, site, number, series.num_bytes, sent, sent, start_s=start_s, seconds=seconds)
            for number, (site, start_s, seconds) in enumerate(spans, series.first_number + 1)
            if number > after and start_s + seconds >= since_s
        ]

    def add_replayed(self, counts: Iterable[Count]) -> None:
        """Count the collectives of a replayed CUDA graph. Their times are unknown, and they are not recorded."""
        for count in counts:
            if not count.calls:
                continue
            totals = self._totals_of(count[:3])
            totals.calls += count.calls
            totals.bytes_sent += count.bytes_sent
            totals.exact_bytes += count.exact_bytes
            totals.message_bytes += count.message_bytes
            self._number += count.calls

    def hide_coding(self) -> None:
        """Mark the running collective as one that encodes inside a fused kernel, so that its coding time is unknown."""
        self._hidden = True

    def _end_coding(self, totals: Totals) -> None:
        self._all_coding_s += self.coding_s
        self._num_unsplit += self._hidden
        if self._hidden or totals.coding_s is None:
            totals.coding_s = None
        else:
            totals.coding_s += self.coding_s
        self.coding_s, self._hidden = 0.0, False

    def spent(self) -> Spent:
        """Time spent in all kinds, less the hidden time. Unlike ``counts``, its cost does not grow with the number of kinds."""
        seconds, coding_s = self._spent_s - self._hidden_s, self._all_coding_s - self._hidden_coding_s
        return Spent(seconds, coding_s, self._num_unsplit)

    def busy(self) -> tuple[float, float]:
        """Seconds in all collectives since start, and the part spent coding; hidden time included."""
        return self._spent_s, self._all_coding_s

    def hide(self, seconds: float, coding_s: float) -> None:
        """Subtract time of collectives that overlapped with this rank's computing from ``spent``."""
        self._hidden_s += seconds
        self._hidden_coding_s += coding_s

    def counts(self) -> list[Count]:
        """Totals so far, in order of first use."""
        return [
            Count(*key, t.calls, t.bytes_sent, t.exact_bytes, t.seconds, t.message_bytes, t.coding_s)
            for key, t in list(self._totals.items())
        ]

    def latencies(self) -> list[Latency]:
        """Quantiles of the newest calls of each kind. Sorts up to 512 numbers per kind, so do not call it in every step."""
        quantiles = [(key, totals.quantiles_s(0.5, 0.99)) for key, totals in list(self._totals.items())]
        return [Latency(*key, *(seconds * 1e6 for seconds in found)) for key, found in quantiles if found]

    def forget_latencies(self) -> None:
        """Restart the quantiles with later calls; the totals continue."""
        for totals in list(self._totals.values()):
            totals.first_timed = totals.calls

    @property
    def number(self) -> int:
        """The number of collectives begun. Ranks run the same ones, so the rank with the lowest number is behind."""
        series = self._series
        return self._number if series is None else series.first_number + series.num_begun

    @property
    def begun(self) -> Begun | None:
        """Op, algorithm, bytes, number, start of the running collective; the same object while it runs outside a kernel."""
        series = self._series
        return self._current if series is None else series.current

    def current(self) -> str | None:
        """The running collective, such as ``all_reduce ring 1152 B, #523, 0.4 s``; None between collectives."""
        begun = self.begun
        return None if begun is None else f"{_words(begun)}, {perf_counter() - begun[-1]:.1f} s"

    def last(self) -> str | None:
        """The collective that ended last; None before the first."""
        series = self._series
        begun = self._last if series is None else self._last_of(series)
        return None if begun is None else _words(begun)

    def start_recording(self) -> None:
        """Keep each collective that ends until ``stop_recording``. Cost: less than a microsecond each.

        When more than 65536 wait for ``take_events``, the oldest are dropped, which shows as a gap in the numbers.
        """
        self._recording_since_s = perf_counter()
        self._events = deque(maxlen=_MAX_EVENTS)

    def take_events(self, at_most: int) -> list[Event]:
        """The oldest recorded collectives not taken yet; empty without a recording."""
        events = self._events
        # Another thread may append to a deque while this one pops, but not while this one iterates.
        return [events.popleft() for _ in range(min(at_most, len(events)))] if events else []

    def stop_recording(self) -> list[Event]:
        """The recorded collectives not taken yet, and last the running one, if any, marked as not finished."""
        series, is_recording = self._series, self._events is not None
        events = self.take_events(_MAX_EVENTS)
        self._events = None
        begun, site = self._current, self.site
        if series is not None:
            begun, site = series.current, series.sites[max(0, series.num_begun - 1)]
            if is_recording:  # the series may have just ended, with its events among those taken
                events += self._events_of(series, after=events[-1].number if events else 0)
        if begun is not None:
            op, algorithm, num_bytes, number, start_s = begun
            seconds = perf_counter() - start_s
            events.append(
                Event(op, algorithm, self.phase, site, number, num_bytes, 0, 0, start_s, seconds, finished=False)
            )
        return events


def _words(begun: Begun) -> str:
    op, algorithm, num_bytes, number, _ = begun
    return f"{op} {algorithm} {num_bytes} B, #{number}"
