"""Collects the reports of ranks into cells: an algorithm at a message size with its time, bytes, error and faults."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tightwire.bench.comm.measure import Checked, Computed, Timed
from tightwire.bench.report.statistics import describe, neighbour_batch
from tightwire.comm.sizes import format_bytes

BASELINE = "native"


@dataclass(kw_only=True, slots=True)
class Cell:
    """Filled while the ranks report; checks and seconds are by rank."""

    size: int
    algorithm: str
    world_size: int
    checks: dict[int, Checked] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    changed_on: set[int] = field(default_factory=set)
    computing_s: float | None = None  # median without a wire, of the slowest rank

    def samples(self) -> list[float]:
        """Seconds on the slowest rank of each call that all ranks have reported; a barrier precedes each call."""
        if len(self.seconds) < self.world_size:
            return []
        return [max(calls) for calls in zip(*self.seconds.values(), strict=False)]

    def faults(self) -> list[str]:
        """Why the answers are wrong; empty when they are right."""
        found: list[str] = []
        shares = [check.share_of_bound for check in self.checks.values() if check.share_of_bound is not None]
        if shares and max(shares) > 1:
            found.append(f"an element is {max(shares):.3g} times as wrong as the algorithm's bound allows")
        digests = {rank: check.digest for rank, check in sorted(self.checks.items())}
        if len(digests) == self.world_size and len(set(digests.values())) > 1:
            found.append(f"ranks got different bits: {', '.join(f'rank {r} {d[:8]}' for r, d in digests.items())}")
        if self.changed_on:
            found.append(f"the same call gave other bits later, on ranks {sorted(self.changed_on)}")
        for rank, check in sorted(self.checks.items()):
            if check.wire_bytes != check.formula_bytes:
                found.append(f"rank {rank} sent {check.wire_bytes} bytes, and its formula says {check.formula_bytes}")
        return found


class Cells:
    """All cells of one group of ranks, in the order in which they were measured.

    ``link``: what lies between the nodes, ``link_bytes_per_s`` its measured rate, for the prediction.
    """

    def __init__(self, world_size: int, *, link: str | None = None, link_bytes_per_s: float | None = None) -> None:
        self._world_size = world_size
        self._link, self._link_bytes_per_s = link, link_bytes_per_s
        self._cells: dict[tuple[int, str], Cell] = {}

    def add(self, rank: int, event: Checked | Timed | Computed) -> None:
        if isinstance(event, Checked):
            self._cell(event.size, event.algorithm).checks[rank] = event
            return
        if isinstance(event, Computed):
            cell = self._cell(event.size, event.algorithm)
            cell.computing_s = max(cell.computing_s or 0.0, median(event.seconds))
            return
        for algorithm, seconds in event.seconds.items():
            cell = self._cell(event.size, algorithm)
            cell.seconds.setdefault(rank, []).extend(seconds)
            if algorithm in event.changed:
                cell.changed_on.add(rank)

    def faults(self) -> list[str]:
        return [
            f"{cell.algorithm} at {cell.size} bytes: {fault}"
            for cell in self._cells.values()
            for fault in cell.faults()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Plain data of every cell that was timed."""
        medians = {key: describe(cell.samples()) for key, cell in self._cells.items()}
        rows = []
        for (size, algorithm), cell in self._cells.items():
            if (seconds := medians[size, algorithm]) is None:
                continue
            baseline = medians.get((size, BASELINE))
            speed_up = baseline.p50 / seconds.p50 if baseline else None
            row = _row(cell, asdict(seconds), speed_up)
            rows.append(row if self._link is None else {**row, **self._link_facts(cell, row)})
        return rows

    def _link_facts(self, cell: Cell, row: Mapping[str, Any]) -> dict[str, Any]:
        """``predicted_s`` is the bytes that a rank sends over the link's rate, and what computing alone takes."""
        rate, computing_s = self._link_bytes_per_s, cell.computing_s
        predicted_s = row["wire_bytes"] / rate + computing_s if rate and computing_s else None
        return {
            "name": f"{row['name']}, {self._link}",
            "link": self._link,
            "link_bytes_per_s": rate,
            "computing_s": computing_s,
            "predicted_s": predicted_s,
            "over_predicted": row["seconds"]["p50"] / predicted_s if predicted_s else None,
        }

    def _cell(self, size: int, algorithm: str) -> Cell:
        return self._cells.setdefault(
            (size, algorithm), Cell(size=size, algorithm=algorithm, world_size=self._world_size)
        )


def _row(cell: Cell, seconds: Mapping[str, Any], speed_up: float | None) -> dict[str, Any]:
    """``algbw`` is the message's bytes over its time, ``busbw`` that times 2 (N-1)/N, what a ring would send."""
    algbw = cell.size / seconds["p50"]
    checks = cell.checks.values()
    return {
        "name": f"{cell.algorithm}, {format_bytes(cell.size)}",
        "size": cell.size,
        "algorithm": cell.algorithm,
        "seconds": dict(seconds),
        "algbw_bytes_per_s": algbw,
        "busbw_bytes_per_s": algbw * 2 * (cell.world_size - 1) / cell.world_size,
        "wire_bytes": max(check.wire_bytes for check in checks),  # of the rank that sends most
        "relative_error": next((c.relative_error for c in checks if c.relative_error is not None), None),
        "share_of_bound": next((c.share_of_bound for c in checks if c.share_of_bound is not None), None),
        "speed_up_over_native": speed_up,
        "faults": cell.faults(),
        "samples": {"seconds": cell.samples()},
        "batch": neighbour_batch(seconds["n"]),
    }
