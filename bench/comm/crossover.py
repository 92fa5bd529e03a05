"""The link rate at which an AllReduce stops being faster than another: measured over several links, and predicted."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from tightwire.bench.report.table import Column, Row
from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.policy.cost import Points, crossover_rate

COLUMNS = (
    Column("stops paying", "algorithm"),
    Column("against", "against"),
    Column("measured Mbit/s", "measured_bytes_per_s", ",.0f", 8e-6),
    Column("extrapolated", "extrapolated", lambda value: "yes" if value else "no"),
    Column("predicted Mbit/s", "predicted_bytes_per_s", ",.0f", 8e-6),
    Column("predicted / measured", "ratio", ".2f"),
)


def measured_crossover(points: Sequence[tuple[float, float]]) -> tuple[float | None, bool]:
    """The rate at which the saved time is zero, and whether it lies outside the measured rates.

    Args:
        points: link rate in bytes per second, seconds that the AllReduce saves on that link.
    Returns:
        The first sign change, linear in 1 / rate between two links; without one, the zero of the line through all points;
        None where that is not at a positive rate.
    """
    line = sorted((1 / rate, saved_s) for rate, saved_s in points)
    for (x0, y0), (x1, y1) in pairwise(line):
        if y0 <= 0 < y1:
            return 1 / (x0 - y0 * (x1 - x0) / (y1 - y0)), False
    if len(line) < 2:
        return None, True
    mean_x, mean_y = (sum(values) / len(line) for values in zip(*line, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in line) / sum((x - mean_x) ** 2 for x, _ in line)
    zero = mean_x - mean_y / slope if slope > 0 else 0.0
    return (1 / zero if zero > 0 else None), True


def make_crossover(
    exact: str, lossy: str, points: Sequence[tuple[float, float]], setting: Setting, num_bytes: int, computing: Points
) -> dict[str, Any]:
    """``points`` as ``measured_crossover`` takes them, beside the cost model's prediction for a message of ``num_bytes``."""
    rate, extrapolated = measured_crossover(points)
    predicted = crossover_rate(setting, exact, lossy, num_bytes, computing=computing)
    return {
        "algorithm": lossy,
        "against": exact,
        "measured_bytes_per_s": rate,
        "extrapolated": extrapolated,
        "predicted_bytes_per_s": predicted,
        "ratio": predicted / rate if predicted and rate else None,
    }


def find_crossovers(cells: Sequence[Row], facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each quantized AllReduce at the largest size, against the lossless one that is fastest on the fastest link.

    The prediction is from computing alone, the median of all links.
    """
    size = max(cell["size"] for cell in cells)
    rows = [cell for cell in cells if cell["size"] == size and cell["link_bytes_per_s"]]
    if len({row["link"] for row in rows}) < 2:
        return []
    by_name: dict[str, dict[float, Row]] = {}
    for row in rows:
        by_name.setdefault(row["algorithm"], {})[row["link_bytes_per_s"]] = row
    fastest = max(row["link_bytes_per_s"] for row in rows)
    lossless = [name for name in by_name if parse_all_reduce(name).lossless]
    if not lossless:
        return []
    exact = min(lossless, key=lambda name: by_name[name][fastest]["seconds"]["p50"])
    setting = Setting("process-group", "cpu", facts["ranks"], facts["nodes"], facts["dtype"])
    computing: Points = {
        name: [(size, 1e6 * median(times))]
        for name, own in by_name.items()
        if (times := [row["computing_s"] for row in own.values() if row["computing_s"]])
    }
    found = []
    for name, own in by_name.items():
        if name not in lossless:
            saved = [
                (rate, by_name[exact][rate]["seconds"]["p50"] - row["seconds"]["p50"]) for rate, row in own.items()
            ]
            found.append(make_crossover(exact, name, saved, setting, size, computing))
    return found
