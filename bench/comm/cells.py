"""Collects the reports of ranks into cells: an AllReduce at a message size with its time, bytes, error and faults."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from tightwire.bench.comm.measure import Outcome
from tightwire.bench.report.statistics import describe, neighbour_batch
from tightwire.bench.report.table import Column, Row, Table
from tightwire.comm.link.link import Link
from tightwire.sizes import format_bytes

_BASELINE = "native"


def _us(name: str, key: str) -> Column:
    return Column(name, key, ",.1f", 1e6)


SIZE, LINK, WORKERS = Column("size", "size", format_bytes), Column("link", "link"), Column("workers", "workers", "d")
US = _us("us median", "seconds.p50")
_ALGORITHM, _WIRE_BYTES = Column("algorithm", "algorithm"), Column("wire bytes", "wire_bytes", ",d")
COLUMNS = (
    *(_ALGORITHM, US, _us("p99", "seconds.p99")),
    Column("algbw GB/s", "algbw_bytes_per_s", ".3f", 1e-9),
    *(Column("busbw GB/s", "busbw_bytes_per_s", ".3f", 1e-9), _WIRE_BYTES),
    *(Column("rel. error", "relative_error", ".1e"), Column("x native", "speed_up_over_native", ".2f")),
)
PREDICTION_COLUMNS = (
    *(LINK, SIZE, _ALGORITHM, _WIRE_BYTES),
    _us("computing us", "computing_s"),
    _us("predicted us", "predicted_s"),
    _us("measured us", "seconds.p50"),
    Column("measured / predicted", "over_predicted", ".3f"),
)


def size_table(rows: Sequence[Row]) -> Table:
    """All algorithms at one size; wrong ones are marked."""
    return Table(title=format_bytes(rows[0]["size"]), columns=COLUMNS, rows=rows, wrong=lambda row: bool(row["faults"]))


class Cells:
    """``rows``: the cells of one group of ranks, in the order in which they were measured, over ``link`` and with ``workers``, if given."""

    def __init__(self, world_size: int, *, link: Link | None = None, workers: int | None = None) -> None:
        self._world_size, self._link, self._workers = world_size, link, workers
        self._waiting: dict[int, dict[int, list[Outcome]]] = {}  # by size and rank
        self.rows: list[dict[str, Any]] = []

    def add(self, rank: int, outcomes: list[Outcome]) -> list[dict[str, Any]]:
        """The rows of a size once all ranks have reported it, otherwise none."""
        by_rank = self._waiting.setdefault(outcomes[0].size, {})
        by_rank[rank] = outcomes
        if len(by_rank) < self._world_size:
            return []
        cells = list(zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True))
        native = next((median(_samples(cell)) for cell in cells if cell[0].algorithm == _BASELINE), None)
        rows = [self._row(cell, native) for cell in cells]
        self.rows += rows
        return rows

    def faults(self) -> list[str]:
        return [f"{row['algorithm']} at {row['size']} bytes: {fault}" for row in self.rows for fault in row["faults"]]

    def _row(self, cell: Sequence[Outcome], native_s: float | None) -> dict[str, Any]:
        """``algbw`` is the message's bytes over its time, ``busbw`` that times 2 (N-1)/N, what a ring would send."""
        first, samples = cell[0], _samples(cell)
        seconds = median(samples)
        wire_bytes = max(outcome.wire_bytes for outcome in cell)  # of the rank that sends most
        computing_s = max((median(outcome.computing) for outcome in cell if outcome.computing), default=None)
        row = {
            "name": f"{first.algorithm}, {format_bytes(first.size)}",
            "size": first.size,
            "algorithm": first.algorithm,
            "seconds": describe(samples),
            "algbw_bytes_per_s": first.size / seconds,
            "busbw_bytes_per_s": first.size / seconds * 2 * (self._world_size - 1) / self._world_size,
            "wire_bytes": wire_bytes,
            "relative_error": math.sqrt(sum(o.squared_error for o in cell) / sum(o.squared_exact for o in cell)),
            "share_of_bound": max(outcome.share_of_bound for outcome in cell),
            "speed_up_over_native": native_s / seconds if native_s else None,
            "computing_s": computing_s,
            "faults": find_faults(cell),
            "samples": {"seconds": samples},
            "batch": neighbour_batch(len(samples)),
        }
        if self._workers is not None:
            row |= {"name": f"{row['name']}, {self._workers} workers", "workers": self._workers}
        if (link := self._link) is None:
            return row
        moving_s = wire_bytes / (link.bytes_per_s or math.inf) + first.rounds * link.latency_s
        predicted_s = moving_s + computing_s if computing_s else None
        return row | {
            "name": f"{row['name']}, {link.name}",
            "link": link.name,
            "link_bytes_per_s": link.bytes_per_s,
            "rounds": first.rounds or None,
            "predicted_s": predicted_s,
            "over_predicted": seconds / predicted_s if predicted_s else None,
        }


def _samples(cell: Sequence[Outcome]) -> list[float]:
    """Seconds on the slowest rank of each call; a barrier precedes each call."""
    return [max(calls) for calls in zip(*(outcome.seconds for outcome in cell), strict=True)]


def find_faults(cell: Sequence[Outcome]) -> list[str]:
    """The ways in which the answers of an algorithm at a size are wrong, by rank; empty when they are right."""
    found: list[str] = []
    if (share := max(outcome.share_of_bound for outcome in cell)) > 1:
        found.append(f"the largest error of an element is {share:.3g} times the algorithm's bound")
    if len({outcome.digest for outcome in cell}) > 1:
        digests = ", ".join(f"rank {rank} {outcome.digest[:8]}" for rank, outcome in enumerate(cell))
        found.append(f"ranks got different bits: {digests}")
    if changed_on := [rank for rank, outcome in enumerate(cell) if outcome.changed]:
        found.append(f"a later call gave other bits, on ranks {changed_on}")
    for rank, outcome in enumerate(cell):
        if outcome.wire_bytes != outcome.formula_bytes:
            found.append(f"rank {rank} sent {outcome.wire_bytes} bytes, but its formula gives {outcome.formula_bytes}")
    return found
