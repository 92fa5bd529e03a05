"""Writes collectives of all ranks as a Chrome trace: the JSON that ui.perfetto.dev and chrome://tracing open.

Each rank has a row and each collective a bar. A bar that is long on all ranks but one shows which rank was late.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.comm.ledger.ledger import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvents:
    """The events of one rank. Times of two ranks are comparable when ``clock`` is equal."""

    rank: int
    clock: str
    events: Sequence[Event]


def clock_name() -> str:
    """Name the clock of ``time.perf_counter``, which all processes of a host share."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip()[:8]}" if boot.exists() else socket.gethostname()


def chrome_trace(ranks: Sequence[RankEvents]) -> dict[str, Any]:
    """Return the trace as an object to write as JSON; times in microseconds, from the first event on each clock.

    Each bar has its message size, the bytes its rank sent, the bytes the exact algorithm would have sent, and its
    number, which is the same on all ranks. A bar is marked ``unfinished`` if its collective was still running.
    """
    clocks: dict[str, float] = {}
    for part in ranks:
        for event in part.events:
            clocks[part.clock] = min(event.start_s, clocks.get(part.clock, event.start_s))
    shared = len({part.clock for part in ranks}) <= 1
    trace_events: list[dict[str, Any]] = []
    for part in ranks:
        name = f"rank {part.rank}" if shared else f"rank {part.rank} (clock of {part.clock})"
        trace_events.append({"ph": "M", "name": "process_name", "pid": part.rank, "args": {"name": name}})
        trace_events.append(
            {"ph": "M", "name": "process_sort_index", "pid": part.rank, "args": {"sort_index": part.rank}}
        )
        trace_events.append(
            {"ph": "M", "name": "thread_name", "pid": part.rank, "tid": 0, "args": {"name": "collectives"}}
        )
        trace_events.extend(_bars(part, clocks.get(part.clock, 0.0)))
    return {
        "traceEvents": trace_events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clocks": "one"
            if shared
            else "ranks of different hosts have clocks of their own: do not compare their times",
            "events": {f"rank {part.rank}": len(part.events) for part in ranks},
            "lost": {f"rank {part.rank}": num for part in ranks if (num := _num_lost(part.events))},
        },
    }


def _bars(part: RankEvents, origin_s: float) -> Iterator[dict[str, Any]]:
    for event in part.events:
        args: dict[str, Any] = {
            "number": event.number,
            "message_bytes": event.message_bytes,
            "bytes_sent": event.bytes_sent,
            "exact_bytes": event.exact_bytes,
            "phase": event.phase,
        }
        if event.site:
            args["site"] = event.site
        if not event.finished:
            args["unfinished"] = True
        yield {
            "ph": "X",
            "name": f"{event.op} {event.algorithm}",
            "cat": event.phase or event.op,
            "pid": part.rank,
            "tid": 0,
            "ts": round((event.start_s - origin_s) * 1e6, 3),
            "dur": round(event.seconds * 1e6, 3),
            "args": args,
        }


def _num_lost(events: Sequence[Event]) -> int:
    """Count gaps in the numbers, which rise by one: each is an event that the ledger dropped."""
    return events[-1].number - events[0].number + 1 - len(events) if events else 0
