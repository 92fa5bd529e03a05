"""The tables and the page of ``bench serve``: latencies and rates of each load, and their plots."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.report.html import Section
from tightwire.bench.report.plots import Ecdf, Samples, lines, plot_section
from tightwire.bench.report.table import Column, Row, Table

_LATENCIES = {
    "ttft_s": "TTFT first text",
    "tpot_s": "TPOT later tokens",
    "itl_s": "ITL gaps in text",
    "e2e_s": "E2E whole answer",
}
_LATENCY_COLUMNS = (
    Column("ms", "latency"),
    Column("n", "n", "d"),
    *(Column(name, name, ",.1f", 1e3) for name in ("mean", "std", "p50", "p90", "p95", "p99")),
)
_OUTPUT_RATE = Column("output tok/s", "output_tokens_per_s", ".1f")
_RATE_COLUMNS = (
    Column("load", "name"),
    Column("requests", "requested", "d"),
    Column("succeeded", "succeeded", "d"),
    Column("seconds", "duration_s", ".2f"),
    Column("requests/s", "requests_per_s", ".2f"),
    _OUTPUT_RATE,
    Column("tok/s", "total_tokens_per_s", ".1f"),
    Column("in flight", "mean_in_flight", ".1f"),
)
_GOODPUT_COLUMNS = (
    Column("within limits", "goodput.share", ".1%"),
    Column("good/s", "goodput.requests_per_s", ".2f"),
)
CSV_COLUMNS = tuple(
    Column(name, name)
    for name in (
        *("load", "index", "sent_s", "late_s", "ttft_s", "tpot_s", "e2e_s"),
        *("num_prompt", "num_cached", "num_generated", "finish_reason", "error"),
    )
)
_FEW_REQUESTS = 100  # with fewer, the 99th percentile is a weighted mean of the two slowest
_MOST_POINTS = 2000  # in a plot of single requests


def latency_table(cells: Sequence[Row]) -> Table:
    rows = [
        {"name": cell["name"], "latency": latency, **(cell[key] or {"n": 0})}
        for cell in cells
        for key, latency in _LATENCIES.items()
    ]
    several = [Column("load", "name")] if len(cells) > 1 else []
    return Table(title="" if several else cells[0]["name"], columns=[*several, *_LATENCY_COLUMNS], rows=rows)


def rate_table(cells: Sequence[Row]) -> Table:
    goodput = _GOODPUT_COLUMNS if any(cell["goodput"] for cell in cells) else ()
    return Table(columns=[*_RATE_COLUMNS, *goodput], rows=cells, wrong=lambda cell: bool(cell["failed"]))


def csv_table(cells: Sequence[Row]) -> Table:
    """A row for each request."""
    return Table(columns=CSV_COLUMNS, rows=[{"load": cell["name"], **raw} for cell in cells for raw in cell["raw"]])


def warnings_of(cell: Row) -> list[str]:
    """What to know before trusting the figures of a load."""
    few = 0 < cell["succeeded"] < _FEW_REQUESTS
    return [
        *(f"failed {count} times: {error}" for error, count in cell["errors"].items()),
        *([f"stopped early: {cell['stopped']}"] if cell["stopped"] else []),
        *cell["doubts"],
        *(
            [f"p99 of {cell['succeeded']} requests is hardly more than the slowest; measure {_FEW_REQUESTS}"]
            if few
            else []
        ),
    ]


def describe_limits(cells: Sequence[Row]) -> list[str]:
    limits = next((cell["goodput"]["slo"] for cell in cells if cell["goodput"]), {})
    words = ", ".join(f"{name.removesuffix('_s')} {limit * 1e3:g} ms" for name, limit in limits.items())
    return [f"within limits: requests that met {words}"] if limits else []


def make_sections(result: Mapping[str, Any]) -> list[Section]:
    cells = result["cells"]
    slo = next((cell["goodput"]["slo"] for cell in cells if cell["goodput"]), {})
    requests = [{"load": cell["name"], **raw} for cell in cells for raw in cell["raw"] if raw["error"] is None]
    sections = [
        _ecdf(cells, "ttft_s", "TTFT", "From sending a request to the first text.", slo.get("ttft_s")),
        _ecdf(cells, "itl_s", "ITL", "Gaps between pieces of text; a piece may hold several tokens.", None),
        _throughput(cells),
        _scatter(requests, "time", "TTFT over the time of the run", Column("s since the load began", "sent_s")),
        _scatter(requests, "length", "TTFT by length of the prompt", Column("prompt tokens", "num_prompt")),
    ]
    notes = [f"{cell['name']}: {words}" for cell in cells for words in warnings_of(cell)]
    return [
        *(section for section in sections if section is not None),
        Section(title="Rates", words=[*describe_limits(cells), *notes], table=rate_table(cells), wide=True),
        Section(title="Latencies in milliseconds", words=[_LATENCY_WORDS], table=latency_table(cells), wide=True),
    ]


_LATENCY_WORDS = (
    "Measured at the client, from when a request is sent. TPOT is the mean time of one answer's tokens after the first; ITL "
    "are all gaps between its pieces."
)


def _ecdf(cells: Sequence[Row], key: str, name: str, words: str, limit_s: float | None) -> Section | None:
    samples = [
        Samples(name=cell["name"], number=number, values=[value * 1e3 for value in values])
        for number, cell in enumerate(cells)
        if (values := _latencies(cell["raw"], key))
    ]
    if not samples:
        return None
    title = f"{name}: share at most this"
    limit = None if limit_s is None else limit_s * 1e3
    plot = Ecdf(name=key.replace("_", "-"), title=title, x_label=f"{name}, ms", samples=samples, line_x=limit)
    return plot_section(plot, words if limit is None else f"{words} Dotted: the limit.")


def _latencies(requests: Sequence[Row], key: str) -> list[float]:
    """Seconds of requests that succeeded; a request has one TTFT and many gaps."""
    values = [raw[key] for raw in requests if raw["error"] is None and raw[key] is not None]
    return [gap for gaps in values for gap in gaps] if key == "itl_s" else values


def _throughput(cells: Sequence[Row]) -> Section | None:
    """None for a single load, whose rates are in the table."""
    if len(cells) < 2:
        return None
    by_rate = cells[0]["concurrency"] is None
    x = Column("requests per second", "request_rate", "g") if by_rate else Column("in flight", "concurrency", "g")
    rows = [{**cell, "all": "all requests"} for cell in cells]
    plot = lines("throughput", "Throughput by load", rows, by="all", x=x, y=_OUTPUT_RATE, ticks=True, log_y=False)
    return plot_section(plot)


def _scatter(requests: Sequence[Row], name: str, title: str, x: Column) -> Section | None:
    """One point for each request; None where all have the same x."""
    if len({x.value(row) for row in requests}) < 2:
        return None
    shown = requests[:: max(1, -(-len(requests) // _MOST_POINTS))]
    y = Column("TTFT, ms", "ttft_s", ".1f", 1e3)
    return plot_section(lines(name, title, shown, by="load", x=x, y=y, log_x=False, log_y=False, joined=False))
