"""The columns and the page of ``bench compare``: every ratio with its interval, then the table."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.report.html import Section
from tightwire.bench.report.plots import Plot, Series, plot_section
from tightwire.bench.report.table import Column, Row, Table

_NUMBERS = (
    Column("A", "a", ",.4g"),
    Column("B", "b", ",.4g"),
    Column("B / A", "ratio", ".3f"),
    Column("low", "low", ".3f"),
    Column("high", "high", ".3f"),
    Column("n", "n", "d"),
)
COLUMNS = (
    Column("cell", "cell"),
    Column("metric", "metric"),
    Column("unit", "unit"),
    *_NUMBERS,
    Column("verdict", "verdict"),
)
CSV_COLUMNS = (*COLUMNS, Column("paired", "paired"), Column("regression", "regression"))


def describe_sides(result: Mapping[str, Any]) -> str:
    a, b = (
        f"{side['path']} ({side['label']})" if side["label"] else side["path"] for side in (result["a"], result["b"])
    )
    return f"bench {result['kind']}: A is {a}, B is {b}"


def make_sections(result: Mapping[str, Any]) -> list[Section]:
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
    table = Table(columns=[Column("row", "row", "d"), *COLUMNS], rows=rows, wrong=lambda cell: cell["regression"])
    words = (
        "A, B: medians. low, high: 95 % interval of B / A, which means nothing where the verdict is `too few`. n: samples; "
        "requests that were in flight together are one, and so are neighbours of many. A verdict needs more than this "
        "interval: a wider one, with which a dozen verdicts are right together."
    )
    return Section(title="Every cell", words=[words], table=table, wide=True)
