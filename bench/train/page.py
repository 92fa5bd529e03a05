"""Makes the HTML page of ``bench train``: step times by link, predictions, checks, and extrapolations."""

from collections.abc import Sequence
from typing import Any

from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Part, Plot, Series, StackedBars, draw
from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.findings import find
from tightwire.bench.train.summary import fault_texts
from tightwire.bench.train.words import (
    CHECK_COLUMNS,
    CHECKS,
    COLUMNS,
    ON_PAPER,
    PAPER_COLUMNS,
    PREDICTIONS,
    TIMES,
    cell_texts,
    check_texts,
    describe_assumptions,
    describe_link,
    describe_others,
    describe_predictions,
    describe_setting,
    paper_texts,
)
from tightwire.comm.link.link import parse_link

_Rows = Sequence[dict[str, Any]]


def make_page(result: dict[str, Any]) -> str:
    """The result of ``bench train`` as one HTML document."""
    rows = result["cells"]
    sections = (
        [_step_times(rows), _predictions(rows), _parts(rows), _cells(rows), _findings(rows), _checks(rows)]
        if rows
        else []
    )
    if "on_paper" in result:
        sections.append(_on_paper(result["on_paper"]))
    return render(
        Page(
            title="Training between nodes",
            lead=describe_setting(result),
            sections=[section for section in sections if section is not None],
            alarms=[f"Not to be trusted: {fault}" for fault in fault_texts(rows)],
            facts=_facts(result),
        )
    )


def _step_times(rows: _Rows) -> Section:
    links = _links(rows)
    rates = [(parse_link(link).bytes_per_s or 0.0) * 8 / 1e6 for link in links]
    series = []
    for number, arm in enumerate(_arms(rows)):
        own = [(rate, row) for rate, link in zip(rates, links, strict=True) for row in _of(rows, link, arm)]
        x, y = [rate for rate, _ in own], [row["seconds"]["p50"] for _, row in own]
        series.append(Series(name=arm, number=number, x=x, y=y, dashed=ARMS[arm].peer is not None))
    plot = Plot(
        name="steps",
        title="Step time by link",
        x_label="link between nodes, Mbit/s",
        y_label="step, s",
        series=series,
        ticks=(rates, [f"{rate:g}" for rate in rates]),
    )
    return Section(title="Step time by link", words=["Dashed: torch's own."], svg=draw(plot))


def _predictions(rows: _Rows) -> Section | None:
    """Plot the predicted and measured time of every cell."""
    predicted = [row for row in rows if row["predicted_s"] is not None]
    if not predicted:
        return None
    series = []
    for number, link in enumerate(_links(predicted)):
        own = [row for row in predicted if row["link"] == link]
        x, y = [row["seconds"]["p50"] for row in own], [row["predicted_s"] / row["seconds"]["p50"] for row in own]
        series.append(Series(name=link, number=number, x=x, y=y))
    plot = Plot(
        name="predictions",
        title="Predicted over measured",
        x_label="step measured, s",
        y_label="predicted / measured",
        series=series,
        log_y=False,
        joined=False,
        line_y=1.0,
        from_zero=False,
    )
    words = [describe_predictions(list(predicted)), PREDICTIONS]
    return Section(title="Predicted over measured", words=words, svg=draw(plot))


def _parts(rows: _Rows) -> Section | None:
    """For the slowest link, the time for computing and for communication that does not overlap it."""
    link = min(_links(rows), key=lambda name: parse_link(name).bytes_per_s or 0.0)
    own = [row for row in rows if row["link"] == link and row["computing_s"] is not None]
    if not own:
        return None
    parts = [
        Part(name=name, number=number, values=[row[f"{name}_s"] for row in own])
        for number, name in enumerate(("computing", "exposed"))
    ]
    title = f"Computing and exposed communication, {link}"
    plot = StackedBars(name="parts", title=title, x_label="s", bars=[row["arm"] for row in own], parts=parts)
    return Section(title=title, svg=draw(plot))


def _cells(rows: _Rows) -> Section:
    table = TableView(
        columns=["link", "arm", *COLUMNS],
        num_words=2,
        rows=[[row["link"], row["arm"], *cell_texts(row)] for row in rows],
        wrong=frozenset(i for i, row in enumerate(rows) if row["faults"]),
    )
    return Section(title="Every cell", words=[TIMES], table=table, wide=True)


def _findings(rows: _Rows) -> Section | None:
    found = find(rows)
    if not found:
        return None
    table = TableView(
        columns=["link", "arm", "against", "at", "x as fast"],
        num_words=4,
        rows=[[each.link, each.arm, each.slower, each.slower_link, f"{each.ratio:.2f}"] for each in found],
    )
    return Section(title="Against each other", table=table, wide=True)


def _checks(rows: _Rows) -> Section:
    table = TableView(
        columns=["link", "arm", *CHECK_COLUMNS],
        num_words=2,
        rows=[[row["link"], row["arm"], *check_texts(row)] for row in rows],
        wrong=frozenset(i for i, row in enumerate(rows) if row["faults"]),
    )
    return Section(title="What was checked", words=[CHECKS], table=table, wide=True)


def _on_paper(paper: dict[str, Any]) -> Section:
    table = TableView(columns=PAPER_COLUMNS, rows=[paper_texts(row) for row in paper["rows"]])
    words = ON_PAPER + describe_assumptions(paper["assumptions"])
    return Section(title="On paper: 8 to 1024 GPUs", words=[words], table=table, wide=True)


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [*environment_facts(result["environment"]), ("seed", str(result["seed"]))]
    facts += [(arm, ARMS[arm].what) for arm in _arms(result["cells"])]
    facts += [("link", describe_link(link)) for link in result["links"]]
    facts += [("left out", words) for words in result["left_out"].values()]
    if "others_share" in result:  # missing if the run stopped early
        facts.append(("quiet", describe_others(result)))
    return facts


def _links(rows: _Rows) -> list[str]:
    return list(dict.fromkeys(row["link"] for row in rows))


def _arms(rows: _Rows) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows))


def _of(rows: _Rows, link: str, arm: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["link"], row["arm"]) == (link, arm)]
