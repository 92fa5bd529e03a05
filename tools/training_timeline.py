"""Runs ``tightwire train`` and writes what each bucket of parameters did when, one file a rank, for ui.perfetto.dev.

    torchrun --standalone --nproc-per-node 2 tools/training_timeline.py OUT pretrain-10m parallel.sharding=zero3 schedule.steps=6 schedule.warmup_steps=0

OUT-rank-0.json and its like are Chrome traces with a row for each kind of work: gathering weights, computing, writing gradients
and reducing them. The last line of rank 0 says which share of gathering and reducing ran beside computing.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

KINDS = ("compute", "gather", "write", "reduce")
Interval = tuple[float, float]


class Timeline:
    """A ``Trace`` of the engine: keeps each piece of work with its begin and end in seconds."""

    def __init__(self) -> None:
        self.work: list[tuple[str, str, str, float, float]] = []  # kind, bucket, buffer, begin, end
        self._begun: dict[tuple[str, str, str], float] = {}
        self._lock = threading.Lock()  # the lanes have threads of their own

    def __call__(self, kind: str, begins: bool, bucket: str, buffer: str) -> None:
        now = time.perf_counter()
        with self._lock:
            if begins:
                self._begun[kind, bucket, buffer] = now
            elif (begun := self._begun.pop((kind, bucket, buffer), None)) is not None:
                self.work.append((kind, bucket, buffer, begun, now))

    def chrome(self, rank: int) -> dict[str, Any]:
        """The trace as an object to write as JSON, in microseconds of the clock that processes of a host share."""
        rows = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": kind}}
            for row, kind in enumerate(KINDS)
        ]
        bars = [
            {
                "ph": "X",
                "name": bucket,
                "cat": kind,
                "pid": rank,
                "tid": KINDS.index(kind),
                "ts": round(begin * 1e6, 3),
                "dur": round((end - begin) * 1e6, 3),
                "args": {"buffer": buffer},
            }
            for kind, bucket, buffer, begin, end in self.work
        ]
        return {"traceEvents": [*rows, *bars], "displayTimeUnit": "ms"}

    def hidden(self, kind: str) -> float:
        """The share of the time of ``kind`` in which this rank computed a block; embedding and norms are open all the time."""
        own, computing = (_joined(self._of(each)) for each in (kind, "compute"))
        total = sum(end - begin for begin, end in own)
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in own for b in computing)
        return both / total if total else 1.0

    def _of(self, kind: str) -> Iterator[Interval]:
        return (
            (begin, end) for each, bucket, _, begin, end in self.work if each == kind and bucket.startswith("block")
        )


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def main(out: str, argv: list[str]) -> int:
    from tightwire.training.cli import train
    from tightwire.training.run import setup

    timeline, rank = Timeline(), int(os.environ.get("RANK", "0"))
    setup.Engine = partial(setup.Engine, trace=timeline)  # pyright: ignore[reportAttributeAccessIssue]
    status = train(argv)
    Path(f"{out}-rank-{rank}.json").write_text(json.dumps(timeline.chrome(rank)))
    if rank == 0:
        shares = ", ".join(f"{kind} {timeline.hidden(kind):.0%}" for kind in ("gather", "reduce"))
        sys.stdout.write(f"beside computing: {shares}; {out}-rank-*.json opens in ui.perfetto.dev\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]) if len(sys.argv) > 2 else __doc__)
