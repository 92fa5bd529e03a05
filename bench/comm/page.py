"""The columns and the page of ``bench comm``: time and bandwidth by size, speed against error, every cell."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.comm.crossover import COLUMNS as CROSSOVER_COLUMNS
from tightwire.bench.report.html import Section
from tightwire.bench.report.plots import lines, plot_section
from tightwire.bench.report.table import Column, Row, Table
from tightwire.comm.all_reduce.registry import parse_all_reduce
from tightwire.comm.sizes import format_bytes


def _microseconds(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


_SIZE = Column("size", "size", format_bytes)
_MEDIAN = Column("us median", "seconds.p50", _microseconds, 1e6)
_ALGBW = Column("algbw GB/s", "algbw_bytes_per_s", ".3f", 1e-9)
_BUSBW = Column("busbw GB/s", "busbw_bytes_per_s", ".3f", 1e-9)
_ERROR = Column("rel. error", "relative_error", ".1e")
_SPEED_UP = Column("x native", "speed_up_over_native", ".2f")
CELL_COLUMNS = (
    Column("algorithm", "algorithm"),
    _MEDIAN,
    Column("p99", "seconds.p99", _microseconds),
    _ALGBW,
    _BUSBW,
    Column("wire bytes", "wire_bytes", ",d"),
    _ERROR,
    _SPEED_UP,
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


def make_sections(result: Mapping[str, Any]) -> list[Section]:
    rows = result["cells"]
    if len(result["links"]) > 1:
        plots = [_by_link(rows), _crossovers(result)]
    else:
        plots = [
            _by_size(rows, "time", "Time", _MEDIAN, "Lower is faster. Where two lines cross, the best choice changes."),
            _by_size(rows, "busbw", "Bus bandwidth", _BUSBW, "Message bytes over time, times 2 (N-1)/N."),
            _speed_and_error(rows),
        ]
    return [*plots, *([_predictions(rows)] if result["links"] else []), _cells(rows)]


def _is_lossy(algorithm: str) -> bool:
    return not parse_all_reduce(algorithm).lossless


def _by_size(rows: Sequence[Row], name: str, title: str, y: Column, words: str) -> Section:
    title = f"{title} by message size"
    plot = lines(name, title, rows, by="algorithm", x=_SIZE, y=y, dashed=_is_lossy, ticks=True)
    return plot_section(plot, f"{words} Dashed: quantized.")


def _by_link(rows: Sequence[Row]) -> Section:
    size = max(row["size"] for row in rows)
    largest = [row for row in rows if row["size"] == size]
    title = f"Time of {format_bytes(size)} by link"
    rate = Column("link rate, Mbit/s", "link_bytes_per_s", ",.0f", 8e-6)
    plot = lines("links", title, largest, by="algorithm", x=rate, y=_MEDIAN, dashed=_is_lossy)
    return plot_section(plot, "Lower is faster. Dashed: quantized.")


def _speed_and_error(rows: Sequence[Row]) -> Section:
    """Speed against error at the largest size."""
    size = max(row["size"] for row in rows)
    largest = [row for row in rows if row["size"] == size and row["relative_error"]]
    title = f"Speed and error at {format_bytes(size)}"
    plot = lines("error", title, largest, by="algorithm", x=_ERROR, y=_SPEED_UP, log_y=False, joined=False, line_y=1.0)
    return plot_section(plot, "Higher is faster, further left is more exact.")


def _crossovers(result: Mapping[str, Any]) -> Section:
    words = "Below this rate of the link the quantized AllReduce is faster."
    table = Table(columns=CROSSOVER_COLUMNS, rows=result.get("crossovers", ()))
    return Section(title="Where quantizing stops paying", words=[words], table=table, wide=True)


def _predictions(rows: Sequence[Row]) -> Section:
    words = "Predicted: bytes that a rank sends over the link's rate, plus what the algorithm computes without a link."
    return Section(title="Prediction", words=[words], table=Table(columns=PREDICTION_COLUMNS, rows=rows), wide=True)


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
