"""``tightwire bench compare A.json B.json``: reports if B became worse than A."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from tightwire.bench.compare.options import CompareOptions
from tightwire.bench.compare.results import Result, Samples, check_alike, differences, read_result
from tightwire.bench.report.page import Item, Text
from tightwire.bench.report.statistics import TOO_FEW, compare
from tightwire.bench.report.table import Column, Metric, Table
from tightwire.bench.run import Bench, BenchFailedError

_COLUMNS = (
    *(Column("cell", "cell"), Column("metric", "metric"), Column("unit", "unit")),
    *(Column("A", "a", ",.4g"), Column("B", "b", ",.4g"), Column("B / A", "ratio", ".3f")),
    *(Column("low", "low", ".3f"), Column("high", "high", ".3f"), Column("n", "n", "d")),
    Column("verdict", "verdict"),
)
_NOTE = (
    "A, B: medians. low, high: 95 % interval of B / A. n: rounds; requests that were in flight together count as one, and so do "
    "consecutive calls of a long series. A verdict also needs a wider interval, with which a dozen verdicts are right together: "
    "`too few rounds` where only that one contains 1, or n is below 3."
)


class CompareBench(Bench[CompareOptions]):
    verb = "compare"
    version = 1
    columns = (*_COLUMNS, Column("paired", "paired"), Column("regression", "regression"))
    failures = ((ValueError, 2),)

    def measure(self) -> None:
        options = self.options
        a, b = read_result(options.a), read_result(options.b)
        check_alike(a, b)
        metrics = a.chosen_metrics(options.metrics)
        self.measured = compare_cells(a, b, metrics, options.tolerance)
        if not self.measured:
            raise ValueError(f"no cell has {' or '.join(metric.name for metric in metrics)} in both results")
        self.facts = {
            "kind": a.kind,
            **{side: {"path": str(of.path), "label": of.raw.get("label")} for side, of in (("a", a), ("b", b))},
            "tolerance": options.tolerance,
            "deciding": [metric.name for metric in metrics if metric.decides],
            "differences": differences(a, b),
            "faults": faults(a, b, options.tolerance),
            "regressions": sum(cell["regression"] for cell in self.measured),
        }
        self.facts["conclusion"] = _conclude(self.facts, self.measured)
        self.print_table(self._table(_describe_sides(self.facts)))
        for text in self.facts["differences"]:
            self.note(text)
        self.print(*self.facts["faults"], style="red")
        self.print(self.facts["conclusion"])
        if self.facts["regressions"]:
            raise BenchFailedError(self.facts["conclusion"])
        if self.facts["faults"]:
            raise BenchFailedError("; ".join(self.facts["faults"]))

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return f"Two results of bench {result['kind']}", _describe_sides(result)

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        notes = [result["conclusion"], *result["faults"], *result["differences"]]
        return [self._table("All cells"), Text(title="Notes", lines=notes)]

    def _table(self, title: str) -> Table:
        return Table(title=title, columns=_COLUMNS, rows=self.measured, note=_NOTE, wrong=lambda row: row["regression"])


def compare_cells(a: Result, b: Result, metrics: Sequence[Metric], tolerance: float) -> list[dict[str, Any]]:
    """Every metric of every cell that is in both results, in the order of ``a``: medians, ratio, interval, verdict."""
    pairs = a.pairing is not None and a.pairing == b.pairing
    found = []
    for name in (name for name in a.cells if name in b.cells):
        cell, other = a.cells[name], b.cells[name]
        batch = max(cell.batch, other.batch)
        for metric in metrics:
            if metric.name in cell.samples and metric.name in other.samples:
                mine, its = (_batched(each.samples[metric.name], batch) for each in (cell, other))
                compared = _compare(metric, mine, its, tolerance, pairs=pairs)
                found.append({"cell": name, "metric": metric.name, "unit": metric.unit, **compared})
    return found


def _batched(samples: Samples, batch: int) -> Samples:
    """The median of each batch, by its number."""
    batches: dict[int, list[float]] = defaultdict(list)
    for number, value in samples.items():
        batches[number // batch].append(value)
    return {number: median(values) for number, values in batches.items()}


def _compare(metric: Metric, mine: Samples, its: Samples, tolerance: float, *, pairs: bool) -> dict[str, Any]:
    shared = sorted(mine.keys() & its.keys())
    paired = pairs and bool(shared)
    before = [mine[i] for i in shared] if paired else list(mine.values())
    after = [its[i] for i in shared] if paired else list(its.values())
    found = compare(before, after, paired=paired, worse_is_higher=metric.worse_is_higher)
    beyond = found.low > 1 + tolerance if metric.worse_is_higher else found.high < 1 - tolerance
    return {
        "a": median(before) * metric.scale,
        "b": median(after) * metric.scale,
        "paired": paired,
        **asdict(found),
        "verdict": {"faster": metric.better, "slower": metric.worse}.get(found.verdict, found.verdict),
        "regression": metric.decides and found.verdict == "slower" and beyond,
    }


def faults(a: Result, b: Result, tolerance: float) -> list[str]:
    """Failures of B that A does not have: times of successful requests do not show them."""
    found = [f"B is not complete, but A is: {b.error}"] if b.error and not a.error else []
    for name in (name for name in a.cells if name in b.cells):
        cell, other = a.cells[name], b.cells[name]
        if not (cell.requested and other.requested):
            continue
        if other.failed / other.requested > cell.failed / cell.requested + tolerance:
            failed = f"{other.failed} of {other.requested} requests failed in B"
            found.append(f"{name}: {failed}, but {cell.failed} of {cell.requested} in A")
    return found


def _conclude(facts: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """The reason for the exit code."""
    deciding = ", ".join(facts["deciding"])
    limit = f"{100 * facts['tolerance']:g} %"
    if count := facts["regressions"]:
        return f"{count} regression{'s' * (count > 1)}: by {deciding}, B is worse by more than {limit} with its whole interval"
    few = sum(cell["verdict"] == TOO_FEW for cell in cells if cell["metric"] in facts["deciding"])
    unsure = f"; {few} with too few rounds to tell: measure more" if few else ""
    return f"no regression: by {deciding}, no cell of B is certain to be worse by more than {limit}{unsure}"


def _describe_sides(result: Mapping[str, Any]) -> str:
    a, b = (f"{own['path']} ({own['label']})" if own["label"] else own["path"] for own in (result["a"], result["b"]))
    return f"bench {result['kind']}: A is {a}, B is {b}"
