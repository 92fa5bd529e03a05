"""From what the ranks of ``bench comm`` report to cells: one algorithm at one size, its time, bytes, error, and faults."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tightwire.bench.comm.measure import Checked, Timed
from tightwire.bench.report.statistics import describe, neighbour_batch
from tightwire.comm.sizes import format_bytes

BASELINE = "native"


@dataclass(kw_only=True, slots=True)
class Cell:
    """Filled while the ranks report. Every list is by rank."""

    size: int
    algorithm: str
    world_size: int
    checks: dict[int, Checked] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    changed_on: set[int] = field(default_factory=set)

    def samples(self) -> list[float]:
        """Seconds on the slowest rank of each call that all ranks have told of; they leave a barrier together before it."""
        if len(self.seconds) < self.world_size:
            return []
        return [max(calls) for calls in zip(*self.seconds.values(), strict=False)]

    def faults(self) -> list[str]:
        """What is wrong with the answers; empty when nothing is."""
        found: list[str] = []
        shares = [check.share_of_bound for check in self.checks.values() if check.share_of_bound is not None]
        if shares and max(shares) > 1:
            found.append(f"an element is {max(shares):.3g} times as wrong as the algorithm's bound allows")
        digests = {rank: check.digest for rank, check in sorted(self.checks.items())}
        if len(digests) == self.world_size and len(set(digests.values())) > 1:
            found.append(f"ranks got unlike bits: {', '.join(f'rank {r} {d[:8]}' for r, d in digests.items())}")
        if self.changed_on:
            found.append(f"the same call gave other bits later, on ranks {sorted(self.changed_on)}")
        for rank, check in sorted(self.checks.items()):
            if check.wire_bytes != check.formula_bytes:
                found.append(f"rank {rank} sent {check.wire_bytes} bytes, and its formula says {check.formula_bytes}")
        return found


class Cells:
    """All cells of a run, in the order in which they were measured."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._cells: dict[tuple[int, str], Cell] = {}

    def add(self, rank: int, event: Checked | Timed) -> None:
        if isinstance(event, Checked):
            self._cell(event.size, event.algorithm).checks[rank] = event
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
            rows.append(_row(cell, asdict(seconds), speed_up))
        return rows

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
