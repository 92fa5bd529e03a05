"""The tables and the page of ``bench comm``: time and bandwidth by size, speed against error, every cell."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.comm.crossover import COLUMNS as CROSSOVER_COLUMNS
from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section
from tightwire.bench.report.plots import Plot, Series, draw
from tightwire.bench.report.quiet import quiet_facts
from tightwire.bench.report.table import Column, Row, Table
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.sizes import format_bytes


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


_SIZE = Column("size", "size", format_bytes)
_MEDIAN = Column("us median", "seconds.p50", _microseconds)
_ALGBW = Column("algbw GB/s", "algbw_bytes_per_s", ".3f", 1e-9)
_BUSBW = Column("busbw GB/s", "busbw_bytes_per_s", ".3f", 1e-9)
CELL_COLUMNS = (
    Column("algorithm", "algorithm"),
    _MEDIAN,
    Column("p99", "seconds.p99", _microseconds),
    _ALGBW,
    _BUSBW,
    Column("wire bytes", "wire_bytes", ",d"),
    Column("rel. error", "relative_error", ".1e"),
    Column("x native", "speed_up_over_native", ".2f"),
)
LINK_COLUMNS = (Column("link", "link"),)
PREDICTION_COLUMNS = (
    *LINK_COLUMNS,
    _SIZE,
    Column("algorithm", "algorithm"),
    Column("wire bytes", "wire_bytes", ",d"),
    Column("computing us", "computing_s", _microseconds),
    Column("predicted us", "predicted_s", _microseconds),
    Column("measured us", "seconds.p50", _microseconds),
    Column("measured / predicted", "over_predicted", ".3f"),
)
CSV_COLUMNS = (
    _SIZE,
    *CELL_COLUMNS,
    Column("calls", "seconds.n", "d"),
    Column("share of bound", "share_of_bound", ".3f"),
)


def is_wrong(row: Row) -> bool:
    return bool(row["faults"])


def describe_setting(facts: Mapping[str, Any], link_facts: Mapping[str, Any] | None) -> str:
    """Ranks, transport and link in one line."""
    nodes = f" on {facts['nodes']} nodes" if facts["nodes"] > 1 else ""
    link = "" if link_facts is None else f" over {_describe_link(link_facts)}"
    return f"{facts['ranks']} ranks{nodes}, {facts['dtype']}, {facts['transport']}{link}"


def _describe_link(link: Mapping[str, Any]) -> str:
    measured = link["measured_bytes_per_s"]
    rate = f", {measured * 8 / 1e6:.1f} Mbit/s of payload" if measured else ""
    return f"{link['name']} ({link['how']}{rate})"


def make_page(result: Mapping[str, Any]) -> Page:
    rows = result["cells"]
    time = (
        "time",
        "Time by message size",
        _MEDIAN,
        1e6,
        "Lower is faster. Where two lines cross, the best choice changes.",
    )
    busbw = ("busbw", "Bus bandwidth by message size", _BUSBW, 1e-9, "Message bytes over time, times 2 (N-1)/N.")
    links = result["link_facts"]
    if len(links) > 1:
        lead = "; ".join(describe_setting(result, link) for link in links)
        plots = [_by_link(rows), _crossovers(result)]
    else:
        lead = describe_setting(result, next(iter(links), None))
        plots = [_by_size(rows, *time), _by_size(rows, *busbw), _speed_and_error(rows)]
    sections = [*plots, *([_predictions(rows)] if links else []), _cells(rows)]
    return Page(
        title="AllReduce by message size",
        lead=lead,
        sections=[section for section in sections if section is not None],
        alarms=[f"Wrong answer: {row['name']}: {fault}" for row in rows for fault in row["faults"]],
        facts=[
            *environment_facts(result["environment"]),
            ("seed", str(result["seed"])),
            *quiet_facts(result),
            *(("link", ", ".join(f"{key} {value}" for key, value in link.items())) for link in links),
        ],
    )


def _by_link(rows: Sequence[Row]) -> Section:
    """Time by link rate at the largest size."""
    size = max(row["size"] for row in rows)
    series = []
    for number, algorithm in enumerate(_algorithms(rows)):
        own = [row for row in rows if row["algorithm"] == algorithm and row["size"] == size and row["link_bytes_per_s"]]
        own.sort(key=lambda row: row["link_bytes_per_s"])
        x, y = [8e-6 * row["link_bytes_per_s"] for row in own], [1e3 * row["seconds"]["p50"] for row in own]
        series.append(Series(name=algorithm, number=number, x=x, y=y, dashed=not parse_all_reduce(algorithm).lossless))
    title = f"Time of {format_bytes(size)} by link"
    plot = Plot(name="links", title=title, x_label="link rate, Mbit/s", y_label="ms median", series=series)
    return Section(title=title, words=["Lower is faster. Dashed: quantized."], svg=draw(plot))


def _crossovers(result: Mapping[str, Any]) -> Section:
    words = "Below this rate of the link the quantized AllReduce is faster."
    table = Table(columns=CROSSOVER_COLUMNS, rows=result.get("crossovers", ()))
    return Section(title="Where quantizing stops paying", words=[words], table=table, wide=True)


def _predictions(rows: Sequence[Row]) -> Section:
    words = "Predicted: bytes that a rank sends over the link's rate, plus what the algorithm computes without a link."
    return Section(title="Prediction", words=[words], table=Table(columns=PREDICTION_COLUMNS, rows=rows), wide=True)


def _by_size(rows: Sequence[Row], name: str, title: str, column: Column, scale: float, words: str) -> Section:
    sizes = sorted({row["size"] for row in rows})
    series = []
    for number, algorithm in enumerate(_algorithms(rows)):
        own = sorted((row for row in rows if row["algorithm"] == algorithm), key=lambda row: row["size"])
        x, y = [row["size"] for row in own], [scale * column.value(row) for row in own]
        series.append(Series(name=algorithm, number=number, x=x, y=y, dashed=not parse_all_reduce(algorithm).lossless))
    ticks = (sizes, [format_bytes(size) for size in sizes])
    plot = Plot(name=name, title=title, x_label="message size", y_label=column.name, series=series, ticks=ticks)
    return Section(title=title, words=[f"{words} Dashed: quantized."], svg=draw(plot))


def _speed_and_error(rows: Sequence[Row]) -> Section | None:
    """Speed against error at the largest size; None where there is nothing to compare with."""
    size = max(row["size"] for row in rows)
    numbers = {name: number for number, name in enumerate(_algorithms(rows))}
    series = [
        Series(
            name=row["algorithm"],
            number=numbers[row["algorithm"]],
            x=[row["relative_error"]],
            y=[row["speed_up_over_native"]],
        )
        for row in rows
        if row["size"] == size and row["speed_up_over_native"] is not None and row["relative_error"]
    ]
    if not series:
        return None
    title = f"Speed and error at {format_bytes(size)}"
    plot = Plot(
        name="error",
        title=title,
        x_label="relative error of the sum (root mean square)",
        y_label="times as fast as native",
        series=series,
        log_y=False,
        joined=False,
        line_y=1.0,
    )
    return Section(title=title, words=["Higher is faster, further left is more exact."], svg=draw(plot))


def _cells(rows: Sequence[Row]) -> Section:
    fastest: dict[Any, float] = {}
    for row in rows:
        place = row.get("link"), row["size"]
        fastest[place] = min(fastest.get(place, row["seconds"]["p50"]), row["seconds"]["p50"])
    table = Table(
        columns=[*(LINK_COLUMNS if "link" in rows[0] else ()), _SIZE, *CELL_COLUMNS],
        rows=rows,
        strong=lambda row: row["seconds"]["p50"] == fastest[row.get("link"), row["size"]],
        wrong=is_wrong,
    )
    words = (
        "Times are the slowest rank's, from a barrier on. Wire bytes are those of the rank that sends most. The fastest "
        "at each size is marked. The result of every call was checked."
    )
    return Section(title="Every cell", words=[words], table=table, wide=True)


def _algorithms(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["algorithm"] for row in rows))
