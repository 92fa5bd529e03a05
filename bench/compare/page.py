"""The columns and the page of ``bench compare``: every ratio with its interval, then the table."""

from collections.abc import Mapping
from typing import Any

from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section
from tightwire.bench.report.plots import Plot, Series, draw
from tightwire.bench.report.table import Column, Table

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


def make_page(result: Mapping[str, Any]) -> Page:
    metrics = list(dict.fromkeys(cell["metric"] for cell in result["cells"]))
    return Page(
        title=f"Two results of bench {result['kind']}",
        lead=describe_sides(result),
        sections=[*(_intervals(result, metric, number) for number, metric in enumerate(metrics, 1)), _table(result)],
        alarms=[*result["faults"], *([result["conclusion"]] if result["regressions"] else [])],
        facts=[
            ("conclusion", result["conclusion"]),
            *(("note", words) for words in result["differences"]),
            *environment_facts(result["environment"]),
        ],
    )


def _intervals(result: Mapping[str, Any], metric: str, number: int) -> Section:
    rows = {place: cell for place, cell in enumerate(result["cells"], 1) if cell["metric"] == metric}
    places, cells = list(rows), list(rows.values())
    series = Series(
        name=metric,
        number=number,
        x=places,
        y=[cell["ratio"] for cell in cells],
        low=[cell["low"] for cell in cells],
        high=[cell["high"] for cell in cells],
    )
    title = f"B / A: {metric}"
    plot = Plot(
        name=f"ratio-{number}",
        title=title,
        x_label="row of the table",
        y_label="B / A",
        series=[series],
        ticks=(places, [str(place) for place in places]),
        log_x=False,
        log_y=False,
        joined=False,
        line_y=1.0,
        from_zero=False,
    )
    decides = "It decides." if metric in result["deciding"] else "It does not decide."
    return Section(title=title, words=[f"Above 1, B is higher. Bars are 95 % intervals. {decides}"], svg=draw(plot))


def _table(result: Mapping[str, Any]) -> Section:
    rows = [{**cell, "row": place} for place, cell in enumerate(result["cells"], 1)]
    table = Table(columns=[Column("row", "row", "d"), *COLUMNS], rows=rows, wrong=lambda cell: cell["regression"])
    words = (
        "A, B: medians. low, high: 95 % interval of B / A, which means nothing where the verdict is `too few`. n: samples; "
        "requests that were in flight together are one, and so are neighbours of many. A verdict needs more than this "
        "interval: a wider one, with which a dozen verdicts are right together."
    )
    return Section(title="Every cell", words=[words], table=table, wide=True)
