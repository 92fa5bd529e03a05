"""A recording of each collective of a rank, and the recordings of all ranks as a Chrome trace.

In the trace each rank has a row and each collective a bar; a bar that is long on all ranks but one shows which was
late. Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

_MAX_EVENTS = 1 << 16  # about 15 s of a small model's decoding, 20 MB

# Op, algorithm, message bytes, number, start, phase, site; a plain tuple, because a NamedTuple takes twice as long.
Begun = tuple[str, str, int, int, float, str, str]


class Event(NamedTuple):
    """One collective. ``start_s`` is on the clock of ``time.perf_counter``, which processes of a Linux host share."""

    op: str
    algorithm: str
    phase: str
    site: str  # the purpose of the sum, such as "o_proj 3"; may be empty
    number: int  # rises by one per collective of a rank; equal numbers on two ranks are the same collective
    message_bytes: int
    bytes_sent: int
    exact_bytes: int
    start_s: float
    seconds: float
    finished: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Equal collectives that a kernel runs without Python in between (``kernels.cpu.shared_sums``), with their times."""

    op: str
    algorithm: str
    phase: str
    num_bytes: int  # size of each tensor
    bytes_sent: int  # by this rank, for each that is done
    sites: Sequence[str]  # one per planned collective
    first_number: int  # number of the collective before the first of these
    progress: np.ndarray  # (2,) int64: the numbers of collectives begun and ended
    stamps_ns: np.ndarray  # (N, 2) int64: begin and end of each, on the clock of ``time.perf_counter``

    @property
    def num_begun(self) -> int:
        return int(self.progress[0])

    @property
    def num_done(self) -> int:
        return int(self.progress[1])

    @property
    def current(self) -> Begun | None:
        """The running collective, or None between collectives."""
        num_begun = self.num_begun
        return self.nth(num_begun - 1) if num_begun > self.num_done else None

    def nth(self, index: int) -> Begun:
        """Collective ``index``, which has begun."""
        start_s = float(self.stamps_ns[index, 0]) * 1e-9
        number = self.first_number + 1 + index
        return self.op, self.algorithm, self.num_bytes, number, start_s, self.phase, self.sites[index]

    def seconds(self) -> list[float]:
        """The duration of each ended collective."""
        return (np.diff(self.stamps_ns[: self.num_done])[:, 0] * 1e-9).tolist()

    def events(self) -> list[Event]:
        """The ended collectives."""
        return [finished_event(self.nth(i), seconds, self.bytes_sent) for i, seconds in enumerate(self.seconds())]


def finished_event(begun: Begun, seconds: float, bytes_sent: int, exact_bytes: int | None = None) -> Event:
    """The event of a collective that has ended; an exact one has no ``exact_bytes`` of its own."""
    op, algorithm, num_bytes, number, start_s, phase, site = begun
    exact_bytes = bytes_sent if exact_bytes is None else exact_bytes
    return Event(op, algorithm, phase, site, number, num_bytes, bytes_sent, exact_bytes, start_s, seconds)


class Recording:
    """Keeps each collective that ends between ``start`` and ``stop``, which any thread may call.

    ``running`` returns the series that a kernel runs, and the collective outside one.
    """

    def __init__(self, running: Callable[[], tuple[Series | None, Begun | None]]) -> None:
        self._running = running
        self.events: deque[Event] | None = None  # while recording
        self._since_s = 0.0

    def start(self) -> None:
        """Start to record. When more than 65536 wait for ``take``, the oldest are dropped: a gap in the numbers."""
        self._since_s = perf_counter()
        self.events = deque(maxlen=_MAX_EVENTS)

    def add_series(self, series: Series) -> None:
        """Record the collectives of ``series`` that ended after ``start``."""
        if self.events is not None:
            self.events.extend(self._recent(series))

    def take(self, at_most: int) -> list[Event]:
        """The oldest recorded collectives not taken yet; empty without a recording."""
        events = self.events
        # Another thread may append to a deque while this one pops, but not while this one iterates.
        return [events.popleft() for _ in range(min(at_most, len(events)))] if events else []

    def stop(self) -> list[Event]:
        """The recorded collectives not taken yet, and last the running one, if any, marked as not finished."""
        is_recording, (series, _) = self.events is not None, self._running()
        events = self.take(_MAX_EVENTS)
        self.events = None
        if series is not None and is_recording:
            # The series may have just ended, with its events among those taken.
            last = events[-1].number if events else 0
            events += [event for event in self._recent(series) if event.number > last]
        begun = self._running()[1] if series is None else series.current
        if begun is not None:
            events.append(finished_event(begun, perf_counter() - begun[4], 0)._replace(finished=False))
        return events

    def _recent(self, series: Series) -> list[Event]:
        return [event for event in series.events() if event.start_s + event.seconds >= self._since_s]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvents:
    """The events of one ledger of a rank, a row in the trace. Times are comparable between ranks of equal ``clock``."""

    rank: int
    row: int = 0
    clock: str
    events: Sequence[Event]


def clock_name() -> str:
    """Name the clock of ``time.perf_counter``, which all processes of a host share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip()[:8]}" if boot.exists() else socket.gethostname()


def chrome_trace(ranks: Sequence[RankEvents]) -> dict[str, Any]:
    """Return the trace as an object to write as JSON; times in microseconds, from the first event on each clock."""
    clocks: dict[str, float] = {}
    for part in ranks:
        for event in part.events:
            clocks[part.clock] = min(event.start_s, clocks.get(part.clock, event.start_s))
    shared = len({part.clock for part in ranks}) <= 1
    trace_events: list[dict[str, Any]] = []
    for part in ranks:
        name = f"rank {part.rank}" if shared else f"rank {part.rank} (clock of {part.clock})"
        trace_events += [
            {"ph": "M", "name": "process_name", "pid": part.rank, "args": {"name": name}},
            {"ph": "M", "name": "process_sort_index", "pid": part.rank, "args": {"sort_index": part.rank}},
            {"ph": "M", "name": "thread_name", "pid": part.rank, "tid": part.row, "args": {"name": _row(part)}},
            *_bars(part, clocks.get(part.clock, 0.0)),
        ]
    return {
        "traceEvents": trace_events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clocks": "one" if shared else "each host has its own clock: do not compare times of different hosts",
            "events": {f"rank {part.rank}, {_row(part)}": len(part.events) for part in ranks},
            "lost": {f"rank {part.rank}, {_row(part)}": num for part in ranks if (num := _num_lost(part.events))},
        },
    }


def _bars(part: RankEvents, origin_s: float) -> Iterator[dict[str, Any]]:
    for event in part.events:
        shown = ("number", "message_bytes", "bytes_sent", "exact_bytes", "phase")
        args: dict[str, Any] = {name: getattr(event, name) for name in shown}
        if event.site:
            args["site"] = event.site
        if not event.finished:
            args["unfinished"] = True
        yield {
            "ph": "X",
            "name": f"{event.op} {event.algorithm}",
            "cat": event.phase or event.op,
            "pid": part.rank,
            "tid": part.row,
            "ts": round((event.start_s - origin_s) * 1e6, 3),
            "dur": round(event.seconds * 1e6, 3),
            "args": args,
        }


def _row(part: RankEvents) -> str:
    return f"messages {part.row}" if part.row else "collectives"


def _num_lost(events: Sequence[Event]) -> int:
    """Count gaps in the numbers, which rise by one: each is an event that the ledger dropped."""
    return events[-1].number - events[0].number + 1 - len(events) if events else 0
