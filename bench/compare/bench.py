"""``tightwire bench compare A.json B.json``: reports if B became worse than A."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightwire.bench.compare.match import check_alike, chosen_metrics, compare_cells, differences, faults
from tightwire.bench.compare.results import read_result
from tightwire.bench.options import REQUIRED, OutputOptions, option, parse_names
from tightwire.bench.report.page import Item, Plot, Text, lines
from tightwire.bench.report.table import Column, Row, Table
from tightwire.bench.run import Bench, BenchFailedError

_DESCRIPTION = """Compare two results of one bench: for every cell the ratio B / A of medians, its bootstrap 95 % interval
from the raw samples, and a verdict. Exit code 0: no regression; 1: a deciding metric is worse and its whole interval is
beyond the tolerance, or requests failed in B that did not fail in A; 2: the files cannot be compared. Requests that were
in flight together count as one sample, and so do consecutive calls of a long series. An interval covers the noise inside
each run, not the drift of the machine between two runs: repeat both before you believe a small difference. For bench ttft
the ratio to the baseline decides, because the drift cancels in it."""

_RATIO = Column("B / A", "ratio", ".3f")
_INTERVAL = Column("low", "low", ".3f"), Column("high", "high", ".3f")
_COLUMNS = (
    *(Column("cell", "cell"), Column("metric", "metric"), Column("unit", "unit")),
    *(Column("A", "a", ",.4g"), Column("B", "b", ",.4g")),
    *(_RATIO, *_INTERVAL, Column("n", "n", "d")),
    Column("verdict", "verdict"),
)


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
        0.05, "accepted slowdown as a share of A, such as 5%", metavar="T", parse=_parse_share, least=0
    )
    metrics: tuple[str, ...] = option(
        (),
        "compare only these metrics, and let each of them decide (default: all; the bench says which decide)",
        metavar="NAME,NAME",
        flag="--metric",
        parse=parse_names,
    )


class CompareBench(Bench[CompareOptions]):
    """Exit codes: 0 without a regression, 1 with one or where B failed, 2 for what cannot be compared, 130 after Ctrl-C."""

    verb = "compare"
    options_type = CompareOptions
    description = _DESCRIPTION
    version = 1
    columns = (*_COLUMNS, Column("paired", "paired"), Column("regression", "regression"))
    failures = ((ValueError, 2),)

    def measure(self) -> None:
        options = self.options
        a, b = read_result(options.a), read_result(options.b)
        check_alike(a, b)
        metrics = chosen_metrics(a, options.metrics)
        self.measured = compare_cells(a, b, metrics, options.tolerance)
        if not self.measured:
            raise ValueError(f"no cell has {' or '.join(metric.name for metric in metrics)} in both results")
        self.facts = {
            "kind": a.kind,
            "a": {"path": str(a.path), "label": a.raw.get("label")},
            "b": {"path": str(b.path), "label": b.raw.get("label")},
            "tolerance": options.tolerance,
            "deciding": [metric.name for metric in metrics if metric.decides],
            "differences": differences(a, b),
            "faults": faults(a, b, options.tolerance),
            "regressions": sum(cell["regression"] for cell in self.measured),
        }
        self.facts["conclusion"] = _conclude(self.facts, self.measured)
        self._show()
        if self.facts["regressions"]:
            raise BenchFailedError(self.facts["conclusion"])
        if self.facts["faults"]:
            raise BenchFailedError("; ".join(self.facts["faults"]))

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return f"Two results of bench {result['kind']}", _describe_sides(result)

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        rows = [{**cell, "row": number} for number, cell in enumerate(result["cells"], 1)]
        metrics = dict.fromkeys(cell["metric"] for cell in rows)
        table = Table(
            title="All cells",
            columns=[_ROW, *_COLUMNS],
            rows=rows,
            note=_NOTE,
            wrong=lambda cell: cell["regression"],
        )
        notes = Text(title="Notes", lines=[result["conclusion"], *result["faults"], *result["differences"]])
        return [*(_plot(rows, metric, metric in result["deciding"]) for metric in metrics), table, notes]

    def _show(self) -> None:
        self.print_table(
            Table(
                title=_describe_sides(self.facts),
                columns=_COLUMNS,
                rows=self.measured,
                wrong=lambda cell: cell["regression"],
            )
        )
        for text in self.facts["differences"]:
            self.note(text)
        self.print(*self.facts["faults"], style="red")
        self.print(self.facts["conclusion"])


def _conclude(facts: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> str:
    """The reason for the exit code."""
    deciding = ", ".join(facts["deciding"])
    limit = f"{100 * facts['tolerance']:g} %"
    if count := facts["regressions"]:
        return f"{count} regression{'s' * (count > 1)}: by {deciding}, B is worse by more than {limit} with its whole interval"
    few = sum(cell["verdict"] == "too few" for cell in cells if cell["metric"] in facts["deciding"])
    unsure = f"; {few} cells have too few samples to tell: measure more" if few else ""
    return f"no regression: by {deciding}, no cell of B is certain to be worse by more than {limit}{unsure}"


def _describe_sides(result: Mapping[str, Any]) -> str:
    a, b = (
        f"{side['path']} ({side['label']})" if side["label"] else side["path"] for side in (result["a"], result["b"])
    )
    return f"bench {result['kind']}: A is {a}, B is {b}"


_ROW = Column("row", "row", "d")
_NOTE = (
    "A, B: medians. low, high: 95 % interval of B / A; it means nothing where the verdict is `too few`. n: samples; requests "
    "that were in flight together count as one, and so do consecutive calls of a long series. A verdict also needs a wider "
    "interval, with which a dozen verdicts are right together."
)


def _plot(rows: Sequence[Row], metric: str, decides: bool) -> Plot:
    own = [row for row in rows if row["metric"] == metric]
    note = f"Above 1, B is higher. Bars are 95 % intervals. This metric {'decides' if decides else 'does not decide'}."
    axes = {"log_x": False, "log_y": False, "joined": False, "from_zero": False, "level": 1.0}
    return lines(f"B / A: {metric}", own, by="metric", x=_ROW, y=_RATIO, interval=_INTERVAL, note=note, **axes)
