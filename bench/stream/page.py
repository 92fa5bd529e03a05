"""The page of ``bench stream``: steps over their bound, what a codec saves at each rate, and every cell in a table."""

from collections.abc import Sequence
from typing import Any

from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Part, Plot, Series, StackedBars, draw
from tightwire.bench.report.quiet import quiet_facts
from tightwire.bench.stream.summary import fault_texts
from tightwire.bench.stream.words import (
    BOUND,
    COLUMNS,
    CORES,
    FORECAST,
    FORECASTS,
    OVERLAP,
    arm_text,
    cell_texts,
    crowds,
    describe_setting,
    forecast_texts,
    load_text,
    verdict,
)

_Rows = Sequence[dict[str, Any]]


def make_page(result: dict[str, Any]) -> str:
    """The result, as ``bench stream`` keeps it, in one HTML document."""
    rows = result["cells"]
    sections = [_against_bound(result), _times(rows), _rates(rows), _cells(rows), _forecasts(rows)] if rows else []
    return render(
        Page(
            title="Streamed weights",
            lead=describe_setting(result),
            sections=[section for section in sections if section is not None],
            alarms=[f"Not to be trusted: {fault}" for fault in fault_texts(rows)],
            facts=_facts(result),
        )
    )


def _against_bound(result: dict[str, Any]) -> Section:
    """Every cell as a point: its bound, and how much longer the step takes."""
    rows, series = result["cells"], []
    for number, codec in enumerate(dict.fromkeys(row["codec"] for row in rows)):
        own = sorted((row for row in rows if row["codec"] == codec), key=lambda row: row["bound_s"])
        x, y = [row["bound_s"] * 1e3 for row in own], [row["over_bound"] for row in own]
        series.append(Series(name=codec, number=number, x=x, y=y))
    plot = Plot(
        name="bound",
        title="Step over its bound",
        x_label="bound, ms",
        y_label="step / bound",
        series=series,
        log_y=False,
        joined=False,
        line_y=1.0,
        from_zero=False,
    )
    return Section(title="Step over its bound", words=[verdict(rows), *crowds(result), BOUND], svg=draw(plot))


def _times(rows: _Rows) -> Section:
    """What both take by themselves in the first kind of step: the longer part is the bound, the bar what one core would take."""
    own = _of_first_step(rows)
    parts = [
        Part(name=name, number=number, values=[row[f"{name}_s"] * 1e3 for row in own])
        for number, name in enumerate(("fetch", "compute"))
    ]
    bars = [f"{arm_text(row)}, tp {row['tp']}" for row in own]
    title = f"Fetch and compute one after the other, {load_text(own[0])}"
    plot = StackedBars(name="parts", title=title, x_label="ms", bars=bars, parts=parts)
    return Section(title=title, words=["Hidden behind the longer, the shorter costs nothing."], svg=draw(plot))


def _rates(rows: _Rows) -> Section | None:
    """Step time by the source's rate; None where it was not slowed down to several."""
    slowed = [row for row in _of_first_step(rows) if row["rate_bytes_per_s"]]
    rates = sorted({row["rate_bytes_per_s"] for row in slowed})
    if len(rates) < 2:
        return None
    series = []
    arms = dict.fromkeys((row["source"], row["codec"], row["tp"]) for row in slowed)
    for number, (source, codec, tp) in enumerate(arms):
        own = [row for row in slowed if (row["source"], row["codec"], row["tp"]) == (source, codec, tp)]
        own.sort(key=lambda row: row["rate_bytes_per_s"])
        x, name = [row["rate_bytes_per_s"] for row in own], f"{source} {codec}, tp {tp}"
        y, wire = (
            [row["seconds"]["p50"] * 1e3 for row in own],
            [max(row["wire_s"], row["compute_s"]) * 1e3 for row in own],
        )
        series.append(Series(name=name, number=number, x=x, y=y))
        series.append(Series(name="", number=number, x=x, y=wire, dashed=True))  # not in the legend
    title = f"By the source's rate, {load_text(slowed[0])}"
    ticks = (rates, [f"{rate / 1e6:g}MB/s" for rate in rates])
    plot = Plot(name="rates", title=title, x_label="rate", y_label="step, ms", series=series, ticks=ticks)
    words = "Dashed, in the same colour: what the bytes take at that rate and nothing else, or the computing where that is longer."
    return Section(title=title, words=[words], svg=draw(plot))


def _of_first_step(rows: _Rows) -> list[dict[str, Any]]:
    return [row for row in rows if load_text(row) == load_text(rows[0])]


def _cells(rows: _Rows) -> Section:
    table = TableView(
        columns=["weights", "tp", "step", *COLUMNS],
        num_words=3,
        rows=[[arm_text(row), str(row["tp"]), load_text(row), *cell_texts(row)] for row in rows],
        wrong=frozenset(i for i, row in enumerate(rows) if row["faults"]),
    )
    words = (
        "Medians of passes, each as long as on the slowest rank. GB/s are of one rank, from source to buffer, decoded."
    )
    return Section(title="Every cell", words=[words, CORES, OVERLAP], table=table, wide=True)


def _forecasts(rows: _Rows) -> Section:
    arms = {(arm_text(row), row["tp"]): row for row in rows}
    table = TableView(
        columns=["weights", "tp", *FORECASTS],
        num_words=2,
        rows=[[arm_text(row), str(row["tp"]), *forecast_texts(row)] for row in arms.values()],
    )
    return Section(title="What to expect", words=[FORECAST], table=table, wide=True)


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [*environment_facts(result["environment"]), ("seed", str(result["seed"]))]
    facts += [("left out", words) for words in result["left_out"]]
    return [*facts, *quiet_facts(result)]
