"""Records when a rank gathered, computed, wrote and reduced each bucket of parameters, for ui.perfetto.dev (``log.trace``)."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

KINDS = ("compute", "gather", "write", "reduce")
_KEPT = 200_000  # pieces of work, about 0.2 kB each
Interval = tuple[float, float]


class Timeline:
    """A ``Trace`` of the engine: keeps the last pieces of work with their begin and end in seconds."""

    def __init__(self) -> None:
        self.work: deque[tuple[str, str, str, float, float]] = deque(maxlen=_KEPT)  # kind, bucket, buffer, begin, end
        self._begun: dict[tuple[str, str, str], float] = {}
        self._lock = threading.Lock()  # the lanes have threads of their own

    def __call__(self, kind: str, begins: bool, bucket: str, buffer: str) -> None:
        now = time.perf_counter()
        with self._lock:
            if begins:
                self._begun[kind, bucket, buffer] = now
            elif (begun := self._begun.pop((kind, bucket, buffer), None)) is not None:
                self.work.append((kind, bucket, buffer, begun, now))

    def write(self, folder: Path, rank: int) -> str:
        """Write ``trace-rank-N.json``, a Chrome trace with a row for each kind of work, if there was any.

        Returns what the user of rank 0 is told. OSError: it cannot be written.
        """
        if not self.work:
            return "no trace is written: no bucket was gathered or reduced"
        (folder / f"trace-rank-{rank}.json").write_text(json.dumps(self.chrome(rank)))
        shares = [(kind, self.hidden(kind)) for kind in ("gather", "reduce") if not rank]
        told = "".join(f"{kind} beside computing: {share:.0%}; " for kind, share in shares if share is not None)
        return f"{told}{folder}/trace-rank-*.json opens in ui.perfetto.dev"

    def chrome(self, rank: int) -> dict[str, Any]:
        """The trace as an object to write as JSON, in microseconds of the clock that processes of a host share."""
        common = [{"pid": rank, "tid": row} for row in range(len(KINDS))]
        rows = [
            {"ph": "M", "name": "thread_name", "args": {"name": kind}, **common[row]} for row, kind in enumerate(KINDS)
        ]
        bars = [
            {"ph": "X", "name": bucket, "cat": kind, "args": {"buffer": buffer}, **common[KINDS.index(kind)]}
            | {"ts": round(begin * 1e6, 3), "dur": round((end - begin) * 1e6, 3)}
            for kind, bucket, buffer, begin, end in self._kept()
        ]
        return {"traceEvents": [*rows, *bars], "displayTimeUnit": "ms"}

    def hidden(self, kind: str) -> float | None:
        """The share of the time of ``kind`` in which this rank computed a block; None: neither was seen.

        Embedding and norms are open all the time, and count neither way. Weights that no rank shards are not seen.
        """
        own, computing = (_joined(self._of(each)) for each in (kind, "compute"))
        if not own or not computing:
            return None
        alone, computed, either = (
            sum(end - begin for begin, end in each) for each in (own, computing, _joined([*own, *computing]))
        )
        return (alone + computed - either) / alone

    def _kept(self) -> list[tuple[str, str, str, float, float]]:
        with self._lock:
            return list(self.work)

    def _of(self, kind: str) -> Iterator[Interval]:
        return ((begin, end) for each, name, _, begin, end in self._kept() if each == kind and name.startswith("block"))


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined
