"""The page of ``bench compare``: every ratio with its interval, then the table."""

from typing import Any

from tightwire.bench.compare.report import COLUMNS, cell_texts, conclusion, head, metric_text
from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Plot, Series, draw


def make_page(result: dict[str, Any]) -> str:
    """The comparison in one HTML document."""
    cells = result["cells"]
    metrics = list(dict.fromkeys(cell["metric"] for cell in cells))
    sections = [_intervals(result, metric, number) for number, metric in enumerate(metrics, 1)]
    return render(
        Page(
            title=f"Two results of bench {result['kind']}",
            lead=head(result),
            sections=[*sections, _table(cells)],
            alarms=[*result["faults"], *([conclusion(result)] if result["regressions"] else [])],
            facts=[
                ("conclusion", conclusion(result)),
                *(("note", words) for words in result["differences"]),
                *environment_facts(result["environment"]),
            ],
        )
    )


def _intervals(result: dict[str, Any], metric: str, number: int) -> Section:
    places = [place for place, cell in enumerate(result["cells"], 1) if cell["metric"] == metric]
    cells = [result["cells"][place - 1] for place in places]
    series = Series(
        name=metric,
        number=number,
        x=places,
        y=[cell["ratio"] for cell in cells],
        low=[cell["low"] for cell in cells],
        high=[cell["high"] for cell in cells],
    )
    title = f"B / A: {metric_text(cells[0])}"
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
    decides = "It decides." if metric in result["deciding"] else "It is shown only."
    return Section(title=title, words=[f"Above 1, B is higher. Bars are 95 % intervals. {decides}"], svg=draw(plot))


def _table(cells: list[dict[str, Any]]) -> Section:
    rows = [[f"{place}. {cell['cell']}", metric_text(cell), *cell_texts(cell)] for place, cell in enumerate(cells, 1)]
    wrong = frozenset(number for number, cell in enumerate(cells) if cell["regression"])
    table = TableView(columns=["cell", "metric", *COLUMNS], rows=rows, num_words=2, wrong=wrong)
    words = (
        "A, B: medians. n: samples; requests that were in flight together are one, and of many others so are neighbours. A "
        "verdict needs more than the 95 % interval beside it: the wider one that a dozen verdicts need to be right together."
    )
    return Section(title="Every cell", words=[words], table=table, wide=True)
