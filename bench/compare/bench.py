"""``tightwire bench compare A.json B.json``: tells whether B became worse than A."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.compare.match import check_alike, chosen_metrics, compare_cells, differences, faults
from tightwire.bench.compare.results import read_result
from tightwire.bench.options import REQUIRED, OutputOptions, option, parse_names, parse_options
from tightwire.bench.report.html import Section
from tightwire.bench.report.plots import Plot, Series, plot_section
from tightwire.bench.report.table import Column, Row, Table, print_table
from tightwire.bench.run import Bench, BenchFailedError

_DESCRIPTION = """Compare two results of one bench: for every cell the ratio B / A of medians, its bootstrap 95 % interval
from the raw samples, and a verdict. Exit code 0: no regression; 1: a deciding metric is worse and its whole interval is
beyond the tolerance, or requests failed in B that did not fail in A; 2: the files cannot be compared. Requests that were
in flight together count as one sample, and so do neighbours of many samples. An interval covers the noise inside each run,
not how the machine drifts between two runs: run both again before you believe a small difference. Of bench ttft the ratio
to the baseline decides, in which that drift cancels."""

_NUMBERS = (
    Column("A", "a", ",.4g"),
    Column("B", "b", ",.4g"),
    Column("B / A", "ratio", ".3f"),
    Column("low", "low", ".3f"),
    Column("high", "high", ".3f"),
    Column("n", "n", "d"),
)
_COLUMNS = (
    Column("cell", "cell"),
    Column("metric", "metric"),
    Column("unit", "unit"),
    *_NUMBERS,
    Column("verdict", "verdict"),
)
_CSV_COLUMNS = (*_COLUMNS, Column("paired", "paired"), Column("regression", "regression"))


def _parse_share(text: str) -> float:
    number, percent = (text[:-1], 0.01) if text.endswith("%") else (text, 1.0)
    try:
        return float(number) * percent
    except ValueError:
        raise ValueError(f"expected a share such as 5% or 0.05, got {text!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions(OutputOptions):
    a: Path = option(REQUIRED, "the result to compare with", flag="a", metavar="A.json")
    b: Path = option(REQUIRED, "the other result of the same bench", flag="b", metavar="B.json")
    tolerance: float = option(
        0.05, "how much worse is still accepted, as a share of A, such as 5%", metavar="T", parse=_parse_share
    )
    metrics: tuple[str, ...] = option(
        (),
        "compare only these, and all of them decide (all, of which the bench's own decide)",
        metavar="NAME,NAME",
        flag="--metric",
        parse=parse_names,
    )

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"--tolerance must be at least 0, got {self.tolerance:g}")


def main(argv: Sequence[str]) -> int:
    """Returns 0 without a regression, 1 with one or where B failed, 2 for what cannot be compared, 130 after Ctrl-C."""
    return CompareBench(parse_options(CompareOptions, argv, verb="compare", description=_DESCRIPTION)).run()


class CompareBench(Bench):
    verb = "compare"
    version = 1
    failures = ((ValueError, 2),)

    def __init__(self, options: CompareOptions) -> None:
        super().__init__(options)
        self._options = options
        self._cells: list[dict[str, Any]] = []

    def measure(self) -> None:
        options = self._options
        a, b = read_result(options.a), read_result(options.b)
        check_alike(a, b)
        metrics = chosen_metrics(a, options.metrics)
        self._cells = compare_cells(a, b, metrics, options.tolerance)
        if not self._cells:
            raise ValueError(f"no cell has {' or '.join(metric.name for metric in metrics)} in both results")
        self.facts = {
            "kind": a.kind,
            "a": {"path": str(a.path), "label": a.raw.get("label")},
            "b": {"path": str(b.path), "label": b.raw.get("label")},
            "tolerance": options.tolerance,
            "deciding": [metric.name for metric in metrics if metric.decides],
            "differences": differences(a, b),
            "faults": faults(a, b, options.tolerance),
            "regressions": sum(cell["regression"] for cell in self._cells),
        }
        self.facts["conclusion"] = _conclude(self.facts, self._cells)
        self._show()
        if self.facts["regressions"]:
            raise BenchFailedError(self.facts["conclusion"])
        if self.facts["faults"]:
            raise BenchFailedError("; ".join(self.facts["faults"]))

    def cells(self) -> list[dict[str, Any]]:
        return self._cells

    def csv(self, result: Mapping[str, Any]) -> Table:
        return Table(columns=_CSV_COLUMNS, rows=result["cells"])

    def sections(self, result: Mapping[str, Any]) -> list[Section]:
        return _make_sections(result)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return f"Two results of bench {result['kind']}", _describe_sides(result)

    def _show(self) -> None:
        title = _describe_sides(self.facts)
        print_table(
            self.console,
            Table(title=title, columns=_COLUMNS, rows=self._cells, wrong=lambda cell: cell["regression"]),
        )
        for words in self.facts["differences"]:
            self.console.print(f"note: {words}", style="yellow", markup=False, soft_wrap=True)
        for words in self.facts["faults"]:
            self.console.print(words, style="red", markup=False, soft_wrap=True)
        self.console.print(self.facts["conclusion"], markup=False, soft_wrap=True)


def _conclude(facts: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """The reason of the exit code, in words."""
    deciding = ", ".join(facts["deciding"])
    limit = f"{100 * facts['tolerance']:g} %"
    if count := facts["regressions"]:
        return (
            f"{count} regression{'s' * (count > 1)}: by {deciding}, B is worse by more than {limit}, interval and all"
        )
    few = sum(cell["verdict"] == "too few" for cell in cells if cell["metric"] in facts["deciding"])
    unsure = f"; {few} of them have too few samples to tell: measure more" if few else ""
    return f"no regression: by {deciding}, no cell of B is surely worse by more than {limit}{unsure}"


def _describe_sides(result: Mapping[str, Any]) -> str:
    a, b = (
        f"{side['path']} ({side['label']})" if side["label"] else side["path"] for side in (result["a"], result["b"])
    )
    return f"bench {result['kind']}: A is {a}, B is {b}"


def _make_sections(result: Mapping[str, Any]) -> list[Section]:
    rows = [{**cell, "row": place} for place, cell in enumerate(result["cells"], 1)]
    metrics = dict.fromkeys(cell["metric"] for cell in rows)
    plots = [_intervals(rows, metric, number, metric in result["deciding"]) for number, metric in enumerate(metrics, 1)]
    notes = Section(title="Notes", words=[result["conclusion"], *result["faults"], *result["differences"]], wide=True)
    return [*plots, _table(rows), notes]


def _intervals(rows: Sequence[Row], metric: str, number: int, decides: bool) -> Section:
    own = [row for row in rows if row["metric"] == metric]
    places = [row["row"] for row in own]
    y, low, high = ([row[key] for row in own] for key in ("ratio", "low", "high"))
    plot = Plot(
        name=f"ratio-{number}",
        title=f"B / A: {metric}",
        x_label="row of the table",
        y_label="B / A",
        series=[Series(name=metric, number=number, x=places, y=y, low=low, high=high)],
        ticks=(places, [str(place) for place in places]),
        log_x=False,
        log_y=False,
        joined=False,
        line_y=1.0,
        from_zero=False,
    )
    words = "It decides." if decides else "It does not decide."
    return plot_section(plot, f"Above 1, B is higher. Bars are 95 % intervals. {words}")


def _table(rows: Sequence[Row]) -> Section:
    table = Table(columns=[Column("row", "row", "d"), *_COLUMNS], rows=rows, wrong=lambda cell: cell["regression"])
    words = (
        "A, B: medians. low, high: 95 % interval of B / A, which means nothing where the verdict is `too few`. n: samples; "
        "requests that were in flight together are one, and so are neighbours of many. A verdict needs more than this "
        "interval: a wider one, with which a dozen verdicts are right together."
    )
    return Section(title="Every cell", words=[words], table=table, wide=True)
