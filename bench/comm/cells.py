"""Collects the reports of ranks into cells: an AllReduce at a message size with its time, bytes, error and faults."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from tightwire.bench.comm.measure import Checked, Computed, Timed
from tightwire.bench.report.statistics import describe, neighbour_batch
from tightwire.bench.report.table import Column, Row
from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.policy.cost import Points, crossover_rate
from tightwire.comm.sizes import format_bytes

_BASELINE = "native"


def _us(name: str, key: str) -> Column:
    return Column(name, key, ",.1f", 1e6)


SIZE = Column("size", "size", format_bytes)
LINK, LINK_RATE = Column("link", "link"), Column("link rate, Mbit/s", "link_bytes_per_s", ",.0f", 8e-6)
MEDIAN = _us("us median", "seconds.p50")
ERROR = Column("rel. error", "relative_error", ".1e")
SPEED_UP = Column("x native", "speed_up_over_native", ".2f")
_ALGORITHM, _WIRE_BYTES = Column("algorithm", "algorithm"), Column("wire bytes", "wire_bytes", ",d")
COLUMNS = (
    *(_ALGORITHM, MEDIAN, _us("p99", "seconds.p99"), Column("algbw GB/s", "algbw_bytes_per_s", ".3f", 1e-9)),
    *(Column("busbw GB/s", "busbw_bytes_per_s", ".3f", 1e-9), _WIRE_BYTES, ERROR, SPEED_UP),
)
PREDICTION_COLUMNS = (
    *(LINK, SIZE, _ALGORITHM, _WIRE_BYTES),
    _us("computing us", "computing_s"),
    _us("predicted us", "predicted_s"),
    _us("measured us", "seconds.p50"),
    Column("measured / predicted", "over_predicted", ".3f"),
)
CROSSOVER_COLUMNS = (
    Column("stops paying", "algorithm"),
    Column("against", "against"),
    Column("measured Mbit/s", "measured_bytes_per_s", ",.0f", 8e-6),
    Column("predicted Mbit/s", "predicted_bytes_per_s", ",.0f", 8e-6),
)


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
        """The ways in which the answers are wrong; empty when they are right."""
        found: list[str] = []
        share = self.of_rank_0("share_of_bound")
        if share is not None and share > 1:
            found.append(f"the largest error of an element is {share:.3g} times the algorithm's bound")
        digests = {rank: check.digest for rank, check in sorted(self.checks.items())}
        if len(digests) == self.world_size and len(set(digests.values())) > 1:
            found.append(f"ranks got different bits: {', '.join(f'rank {r} {d[:8]}' for r, d in digests.items())}")
        if self.changed_on:
            found.append(f"a later call gave other bits, on ranks {sorted(self.changed_on)}")
        for rank, check in sorted(self.checks.items()):
            if check.wire_bytes != check.formula_bytes:
                found.append(f"rank {rank} sent {check.wire_bytes} bytes, but its formula gives {check.formula_bytes}")
        return found

    def of_rank_0(self, name: str) -> float | None:
        """An error, which only rank 0 reports."""
        return getattr(self.checks[0], name) if 0 in self.checks else None


class Cells:
    """All cells of one group of ranks, in the order in which they were measured.

    ``link`` is between the nodes; ``link_bytes_per_s`` is its measured rate, for the prediction.
    """

    def __init__(self, world_size: int, *, link: str | None = None, link_bytes_per_s: float | None = None) -> None:
        self._world_size = world_size
        self._link, self._link_bytes_per_s = link, link_bytes_per_s
        self._cells: dict[tuple[int, str], Cell] = {}

    def add(self, rank: int, event: Checked | Timed | Computed) -> None:
        if isinstance(event, Checked):
            self._cell(event.size, event.algorithm).checks[rank] = event
        elif isinstance(event, Computed):
            cell = self._cell(event.size, event.algorithm)
            cell.computing_s = max(cell.computing_s or 0.0, median(event.seconds))
        else:
            for algorithm, seconds in event.seconds.items():
                cell = self._cell(event.size, algorithm)
                cell.seconds.setdefault(rank, []).extend(seconds)
                if algorithm in event.changed:
                    cell.changed_on.add(rank)

    def faults(self) -> list[str]:
        cells = self._cells.values()
        return [f"{cell.algorithm} at {cell.size} bytes: {fault}" for cell in cells for fault in cell.faults()]

    def rows(self) -> list[dict[str, Any]]:
        """Plain data of every cell that was timed."""
        return [self._row(cell, samples) for cell in self._cells.values() if (samples := cell.samples())]

    def _row(self, cell: Cell, samples: list[float]) -> dict[str, Any]:
        """``algbw`` is the message's bytes over its time, ``busbw`` that times 2 (N-1)/N, what a ring would send.

        ``predicted_s`` is the bytes that a rank sends over the link's rate, plus the time of computing alone.
        """
        seconds, baseline = median(samples), self._cells.get((cell.size, _BASELINE))
        wire_bytes = max(check.wire_bytes for check in cell.checks.values())  # of the rank that sends most
        native = baseline.samples() if baseline else []
        row = {
            "name": f"{cell.algorithm}, {format_bytes(cell.size)}",
            "size": cell.size,
            "algorithm": cell.algorithm,
            "seconds": asdict(describe(samples)),  # pyright: ignore[reportArgumentType]
            "algbw_bytes_per_s": cell.size / seconds,
            "busbw_bytes_per_s": cell.size / seconds * 2 * (cell.world_size - 1) / cell.world_size,
            "wire_bytes": wire_bytes,
            "relative_error": cell.of_rank_0("relative_error"),
            "share_of_bound": cell.of_rank_0("share_of_bound"),
            "speed_up_over_native": median(native) / seconds if native else None,
            "computing_s": cell.computing_s,
            "faults": cell.faults(),
            "samples": {"seconds": samples},
            "batch": neighbour_batch(len(samples)),
        }
        if self._link is None:
            return row
        rate, computing_s = self._link_bytes_per_s, cell.computing_s
        predicted_s = wire_bytes / rate + computing_s if rate and computing_s else None
        return row | {
            "name": f"{row['name']}, {self._link}",
            "link": self._link,
            "link_bytes_per_s": rate,
            "predicted_s": predicted_s,
            "over_predicted": seconds / predicted_s if predicted_s else None,
        }

    def _cell(self, size: int, algorithm: str) -> Cell:
        new = Cell(size=size, algorithm=algorithm, world_size=self._world_size)
        return self._cells.setdefault((size, algorithm), new)


def find_crossovers(cells: Sequence[Row], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The link rate at which each quantized AllReduce stops being faster than the best lossless one, at the largest size.

    The best lossless one is the fastest on the fastest link. The prediction is the cost model's, from the measured times of
    computing alone.
    """
    size = max(cell["size"] for cell in cells)
    by_name: dict[str, dict[float, Row]] = {}
    for row in cells:
        if row["size"] == size and row["link_bytes_per_s"]:
            by_name.setdefault(row["algorithm"], {})[row["link_bytes_per_s"]] = row
    seconds = {name: {rate: row["seconds"]["p50"] for rate, row in own.items()} for name, own in by_name.items()}
    lossless = [name for name in by_name if parse_all_reduce(name).lossless]
    if not lossless:
        return []
    exact = min(lossless, key=lambda name: seconds[name][max(seconds[name])])
    setting = Setting("process-group", "cpu", facts["ranks"], facts["nodes"], facts["dtype"])
    computing: Points = {
        name: [(size, 1e6 * median(times))]
        for name, own in by_name.items()
        if (times := [row["computing_s"] for row in own.values() if row["computing_s"]])
    }
    return [
        {
            "algorithm": name,
            "against": exact,
            "measured_bytes_per_s": zero_rate([(rate, seconds[exact][rate] - s) for rate, s in seconds[name].items()]),
            "predicted_bytes_per_s": crossover_rate(setting, exact, name, size, computing=computing),
        }
        for name in by_name
        if name not in lossless
    ]


def zero_rate(points: Sequence[tuple[float, float]]) -> float | None:
    """The rate at which the saved seconds become zero, interpolated linearly in 1 / rate; None outside the measured rates.

    Args:
        points: link rate in bytes per second, seconds that the AllReduce saves on that link.
    """
    line = sorted((1 / rate, saved_s) for rate, saved_s in points)
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 <= 0 < y1:
            return 1 / (x0 - y0 * (x1 - x0) / (y1 - y0))
    return None
