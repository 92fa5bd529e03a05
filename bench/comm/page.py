"""The page of ``bench comm``: where the algorithms cross, what an error buys, and every cell in a table."""

from collections.abc import Callable, Sequence
from typing import Any

from tightwire.bench.comm.words import COLUMNS, cell_texts, describe_setting, fault_texts
from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Plot, Series, draw
from tightwire.bench.report.quiet import quiet_facts
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.sizes import format_bytes

_Rows = Sequence[dict[str, Any]]


def make_page(result: dict[str, Any]) -> str:
    """The result, as ``bench comm`` keeps it, in one HTML document."""
    rows = result["cells"]
    sections = [_time(rows), _busbw(rows), _bargain(rows), _winners(rows), _cells(rows)] if rows else []
    return render(
        Page(
            title="AllReduce by message size",
            lead=describe_setting(result),
            sections=[section for section in sections if section is not None],
            alarms=[f"Wrong answer: {fault}" for fault in fault_texts(rows)],
            facts=_facts(result),
        )
    )


def _time(rows: _Rows) -> Section:
    return _by_size(
        rows,
        "time",
        "Time by message size",
        "median us",
        "Lower is faster. Where two lines cross, the better choice changes.",
        lambda row: row["seconds"]["p50"] * 1e6,
    )


def _busbw(rows: _Rows) -> Section:
    return _by_size(
        rows,
        "busbw",
        "Bus bandwidth by message size",
        "busbw, GB/s",
        "Bytes of the message over the time, times 2 (N-1)/N. Encoded, more than the wire carries may pass.",
        lambda row: row["busbw_bytes_per_s"] / 1e9,
    )


def _by_size(
    rows: _Rows, name: str, title: str, y_label: str, words: str, value: Callable[[dict[str, Any]], float]
) -> Section:
    sizes = _sizes(rows)
    series = []
    for number, algorithm in enumerate(_algorithms(rows)):
        own = sorted((row for row in rows if row["algorithm"] == algorithm), key=lambda row: row["size"])
        x, y = [row["size"] for row in own], [value(row) for row in own]
        series.append(Series(name=algorithm, number=number, x=x, y=y, dashed=not _lossless(algorithm)))
    labels = [format_bytes(size) for size in sizes]
    plot = Plot(name=name, title=title, x_label="message size", y_label=y_label, series=series, ticks=(sizes, labels))
    return Section(title=title, words=[f"{words} Dashed: quantized."], svg=draw(plot))


def _bargain(rows: _Rows) -> Section | None:
    """Speed against error at the largest size; None where there is nothing to compare with."""
    size = _sizes(rows)[-1]
    series = [
        Series(name=algorithm, number=number, x=[row["relative_error"]], y=[row["speed_up_over_native"]])
        for number, algorithm in enumerate(_algorithms(rows))
        for row in rows
        if (row["algorithm"], row["size"]) == (algorithm, size)
        and row["speed_up_over_native"] is not None
        and row["relative_error"]
    ]
    if not series:
        return None
    title = f"What an error buys at {format_bytes(size)}"
    plot = Plot(
        name="bargain",
        title=title,
        x_label="relative error of the sum (root mean square)",
        y_label="times as fast as native",
        series=series,
        log_y=False,
        joined=False,
        line_y=1.0,
    )
    return Section(title=title, words=["Further up is faster, further left is more exact."], svg=draw(plot))


def _winners(rows: _Rows) -> Section:
    """The fastest at each size, among all and among those that lose nothing."""
    table = []
    for size in _sizes(rows):
        here = sorted((row for row in rows if row["size"] == size), key=lambda row: row["seconds"]["p50"])
        exact = [row for row in here if _lossless(row["algorithm"])]
        table.append([format_bytes(size), *(_name_and_time(group[0]) if group else "-" for group in (here, exact))])
    columns = ["size", "fastest", "fastest that quantizes nothing"]
    return Section(title="The fastest at each size", table=TableView(columns=columns, rows=table, num_words=3))


def _name_and_time(row: dict[str, Any]) -> str:
    return f"{row['algorithm']}, {cell_texts(row)[0]} us"


def _cells(rows: _Rows) -> Section:
    best = {size: min(row["seconds"]["p50"] for row in rows if row["size"] == size) for size in _sizes(rows)}
    table = TableView(
        columns=["size", "algorithm", *COLUMNS],
        num_words=2,
        rows=[[format_bytes(row["size"]), row["algorithm"], *cell_texts(row)] for row in rows],
        strong=frozenset(i for i, row in enumerate(rows) if row["seconds"]["p50"] == best[row["size"]]),
        wrong=frozenset(i for i, row in enumerate(rows) if row["faults"]),
    )
    words = (
        "Times are the slowest rank's, from a barrier on. Wire bytes are those of the rank that sends most. The fastest "
        "at each size stands out. Every call's result was checked."
    )
    return Section(title="Every cell", words=[words], table=table, wide=True)


def _facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    link = result["link"]
    facts = [*environment_facts(result["environment"]), ("seed", str(result["seed"])), *quiet_facts(result)]
    return facts if link is None else [*facts, ("link", ", ".join(f"{key} {value}" for key, value in link.items()))]


def _sizes(rows: _Rows) -> list[int]:
    return sorted({row["size"] for row in rows})


def _algorithms(rows: _Rows) -> list[str]:
    return list(dict.fromkeys(row["algorithm"] for row in rows))


def _lossless(algorithm: str) -> bool:
    return parse_all_reduce(algorithm).lossless
