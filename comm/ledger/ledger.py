"""Counts, bytes and times of the collectives by (op, algorithm, phase); the running one; and a recording of each.

Cheap enough to stay on: 0.5 us a collective. One thread, the one that runs the collectives, writes (and
one that lets them run beside its work tells what it did not wait for: ``hide``); any thread may read, and any may start and
stop a recording.

On CUDA ``seconds`` is the time to enqueue the collective, because the host does not wait for the device; the same goes
for ``codec_seconds``.
"""

from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import NamedTuple

from tightwire.comm.ledger.series import NUM_RECENT, Series, Totals

GATHERING = "weights"  # the phase of partitioned layers, which are gathered beside steps

_MAX_EVENTS = 1 << 16  # of a recording that nobody takes away: some 15 s of a small model's decoding, 20 MB


class Count(NamedTuple):
    """Totals since start of one (op, algorithm, phase); ``seconds`` includes waiting for slower ranks."""

    op: str
    algorithm: str
    phase: str
    calls: int
    bytes_sent: int
    exact_bytes: int  # what the exact algorithm of the same shape would have sent; bytes_sent itself when exact
    seconds: float
    message_bytes: int  # of the tensors given, as the ranks hold them
    codec_seconds: float | None = 0.0  # of ``seconds``, to encode and decode; None: inside a fused kernel, not known

    def since(self, before: "Count | None") -> "Count":
        """What was added to these totals after ``before`` was read (None: after the start)."""
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
    """Time that was waited for collectives since start, of which ``codec_seconds`` is known to be encoding and decoding.

    ``num_unsplit``: calls that encode inside a fused kernel; their share is in ``seconds`` alone.
    """

    seconds: float = 0.0
    codec_seconds: float = 0.0
    num_unsplit: int = 0


class Latency(NamedTuple):
    """How long the newest calls (512 at most) of one (op, algorithm, phase) took: half of them less than ``p50_us``."""

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
    site: str  # what the sum is for, such as "o_proj 3"; empty when the caller does not say
    number: int  # counts up by one per rank; equal numbers on two ranks are the same collective
    message_bytes: int
    bytes_sent: int
    exact_bytes: int
    start_s: float
    seconds: float
    finished: bool = True


# Op, algorithm, message bytes, number, start; a NamedTuple takes twice as long.
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

    The caller sets ``phase`` ("prefill", "decode", ...) per step and may set ``site`` per collective. A collective that
    quantizes does its encoding and decoding inside ``with ledger.coding``, which is not to be nested, or calls
    ``hide_coding``.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.site = ""
        self.coding = _CodingTimer(self)
        self.coding_s = 0.0  # of the collective that runs
        self._hidden = False  # whether that one encodes where nobody sees it
        self._spent_s = self._all_coding_s = 0.0
        self._hidden_s = self._hidden_coding_s = 0.0  # of those, what passed while others computed
        self._num_unsplit = 0
        self._totals: dict[tuple[str, str, str], Totals] = {}
        self._number = 0
        self._current: Begun | None = None
        self._last: Begun | None = None
        self._series: Series | None = None  # what a kernel runs now
        self._events: deque[Event] | None = None
        self._recording_since_s = 0.0

    def begin(self, op: str, algorithm: str, num_bytes: int) -> None:
        """A collective over a tensor of ``num_bytes`` starts. If it fails it is never ended, and stays ``current``."""
        self._number = number = self._number + 1
        self._current = (op, algorithm, num_bytes, number, perf_counter())

    def end(self, bytes_sent: int, exact_bytes: int | None = None) -> None:
        """The collective begun last is done; this rank sent ``bytes_sent`` to others for it.

        ``exact_bytes``: what it would have sent unquantized; None: it was exact.
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
        """A kernel is to run these collectives, of which ``number``, ``begun`` and the like tell while it does."""
        self._series = series

    def end_series(self) -> int:
        """The kernel has returned: count what it has done, and give the bytes that this rank sent for it.

        One that was begun and not done stays ``current``. Cost: some 20 us for 60 of them, 60 more in a recording.
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
        """Those that ended in the recording, and whose number is above ``after``."""
        key, since_s, sent = (series.op, series.algorithm, self.phase), self._recording_since_s, series.bytes_sent
        spans = zip(series.sites, series.starts_s(), series.seconds(), strict=False)
        return [
            Event(*key, site, number, series.num_bytes, sent, sent, start_s=start_s, seconds=seconds)
            for number, (site, start_s, seconds) in enumerate(spans, series.first_number + 1)
            if number > after and start_s + seconds >= since_s
        ]

    def add_replayed(self, counts: Iterable[Count]) -> None:
        """Collectives that ran inside a replayed CUDA graph; how long they took nobody knows, nor are they recorded."""
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
        """The collective that runs encodes and decodes inside a fused kernel, and nobody knows for how long."""
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
        """The sum of all kinds without what was hidden; unlike ``counts`` it costs no more when there are many."""
        seconds, coding_s = self._spent_s - self._hidden_s, self._all_coding_s - self._hidden_coding_s
        return Spent(seconds, coding_s, self._num_unsplit)

    def busy(self) -> tuple[float, float]:
        """Seconds in all collectives since start, and of coding, waited for or not."""
        return self._spent_s, self._all_coding_s

    def hide(self, seconds: float, coding_s: float) -> None:
        """So much of the collectives' time passed while this rank computed."""
        self._hidden_s += seconds
        self._hidden_coding_s += coding_s

    def counts(self) -> list[Count]:
        """Totals so far, in order of first use."""
        return [
            Count(*key, t.calls, t.bytes_sent, t.exact_bytes, t.seconds, t.message_bytes, t.coding_s)
            for key, t in list(self._totals.items())
        ]

    def latencies(self) -> list[Latency]:
        """Quantiles of the newest calls of each kind. Sorts 512 numbers for each: for now and then, not for a step."""
        quantiles = [(key, totals.quantiles_s(0.5, 0.99)) for key, totals in list(self._totals.items())]
        return [Latency(*key, *(seconds * 1e6 for seconds in found)) for key, found in quantiles if found]

    def forget_latencies(self) -> None:
        """Quantiles are of later calls from now on; totals go on."""
        for totals in list(self._totals.values()):
            totals.first_timed = totals.calls

    @property
    def number(self) -> int:
        """How many collectives have been begun. Ranks run the same ones, so the rank with the fewest is behind."""
        series = self._series
        return self._number if series is None else series.first_number + series.num_begun

    @property
    def begun(self) -> Begun | None:
        """The collective that runs now: op, algorithm, bytes, number, start. One object as long as it runs, if not in a kernel."""
        series = self._series
        return self._current if series is None else series.current

    def current(self) -> str | None:
        """The collective that runs now, such as ``all_reduce ring 1152 B, #523, 0.4 s``; None between collectives."""
        begun = self.begun
        return None if begun is None else f"{_words(begun)}, {perf_counter() - begun[-1]:.1f} s"

    def last(self) -> str | None:
        """The collective that was finished last; None before the first."""
        series = self._series
        begun = self._last if series is None else self._last_of(series)
        return None if begun is None else _words(begun)

    def start_recording(self) -> None:
        """From now on keep each collective that ends, until ``stop_recording``: a fraction of a microsecond for each.

        When more than 65536 wait to be taken the oldest are lost, which shows as a gap in their numbers.
        """
        self._recording_since_s = perf_counter()
        self._events = deque(maxlen=_MAX_EVENTS)

    def take_events(self, at_most: int) -> list[Event]:
        """The oldest recorded collectives that have not been taken yet; empty when nothing is recorded."""
        events = self._events
        # A deque may be emptied by one thread while another fills it, but not be iterated.
        return [events.popleft() for _ in range(min(at_most, len(events)))] if events else []

    def stop_recording(self) -> list[Event]:
        """What was not taken yet, and at its end the collective that runs now, if any, as far as it has come."""
        series, is_recording = self._series, self._events is not None
        events = self.take_events(_MAX_EVENTS)
        self._events = None
        begun, site = self._current, self.site
        if series is not None:
            begun, site = series.current, series.sites[max(0, series.num_begun - 1)]
            if is_recording:  # the series may have ended just now, and its events be among those taken
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
