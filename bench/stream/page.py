"""Makes the tables, plots and explanations of ``bench stream`` for the terminal, CSV and the HTML page."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.report.html import Section
from tightwire.bench.report.plots import Part, Plot, Series, StackedBars, draw
from tightwire.bench.report.table import Column, Table

_NEAR, _HIDDEN = 0.1, 0.95  # the verdict counts cells this near to the bound, and with this much overlap
_ARM_COLUMNS = (Column("weights", "arm"), Column("tp", "tp", "d"))
CELL_COLUMNS = (
    Column("step", "load"),
    Column("fetch ms", "fetch_s", ",.1f", 1e3),
    Column("GB/s", "bytes_per_s", ".3f", 1e-9),
    Column("compute ms", "compute_s", ",.1f", 1e3),
    Column("step ms", "step_s", ",.1f", 1e3),
    Column("/bound", "over_bound", ".3f"),
    Column("/source", "over_source_bound", ".3f"),
    Column("/cores", "over_cores_bound", ".3f"),
    Column("/wire", "over_wire_bound", ".3f"),
    Column("overlap", "overlap", ".1%"),
    Column("x none", "speed_up_over_none", ".2f"),
    Column("tokens/s", "tokens_per_s", ",.1f"),
)
_FORECAST_COLUMNS = (
    *_ARM_COLUMNS,
    Column("TTFT of 512, s", "ttft_s", ".2f"),
    Column("as much computing as fetching at", "break_even_rows", lambda rows: f"{rows:,.0f} rows"),
)
_CSV_KEYS = (
    *("tp", "dp", "source", "io", "codec", "rate_bytes_per_s", "step_kind", "rows", "bytes_per_step", "bytes_per_s"),
    *("fetch_s", "raw_s", "compute_s", "step_s", "bound_by", "over_bound", "over_source_bound", "over_cores_bound"),
    *("over_wire_bound", "overlap", "speed_up_over_none", "tokens_per_s", "ttft_s", "break_even_rows", "same_tokens"),
)
_BOUND = (
    "The bound is the longer of fetch (all streamed layers fetched, nothing computed) and compute (the same step with resident "
    "weights), measured in turns with the step in the same processes. /bound is step / bound. /source uses the source's own time "
    "(plain copies, reads or gathers of a pass's bytes) for fetch; /wire, with --rates, the bytes / rate. The buffers hold two "
    "layers, so where fetch and compute are about equal a step is longer than either."
)
_CORES = (
    "On a CPU copying and decoding use the same cores as computing: /cores is against the bound or, if that is longer, the core "
    "seconds of fetch and compute over all cores. Neither includes the shared memory bandwidth."
)
_OVERLAP = (
    "Overlap is (fetch + compute - step) / min(fetch, compute), from the buffers' trace of each step on the rank with the least. "
    "There is no trace on CUDA."
)
_FORECAST = (
    "TTFT is a prompt of 512 tokens in one step: the longer of its computing with resident weights and one fetch. From that many "
    "rows in a step on, computing takes longer than fetching."
)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(columns=[Column(key, key) for key in _CSV_KEYS], rows=rows)


def arm_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The cells of one arm."""
    title = f"{rows[0]['arm']}, tp {rows[0]['tp']}"
    return Table(columns=CELL_COLUMNS, rows=rows, title=title, wrong=lambda row: bool(row["faults"]))


def forecast_line(row: Mapping[str, Any]) -> str:
    return (
        f"a prompt of 512 tokens takes {row['ttft_s']:.2f} s; computing takes as long as fetching at {row['break_even_rows']:,.0f} "
        "rows a step"
    )


def describe_setting(facts: Mapping[str, Any]) -> str:
    """Model, weights and layers in one line."""
    layers = f"{facts['stream_layers']} of {facts['num_layers']} layers streamed"
    replicas = f"; peers: {facts['dp']} replicas" if facts["dp"] > 1 else ""
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return (
        f"{facts['model']}, {facts['weights']}, {layers}; {facts['device']}, {threads} a rank; "
        f"{facts['context']} tokens of context{replicas}"
    )


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many cells are near their bound and hide the shorter part."""
    near = sum(row["over_bound"] <= 1 + _NEAR for row in rows)
    near_cores = sum(row["over_cores_bound"] <= 1 + _NEAR for row in rows)
    traced = [row["overlap"] for row in rows if row["overlap"] is not None]
    hidden = f"; {sum(overlap >= _HIDDEN for overlap in traced)} hide {_HIDDEN:.0%} or more" if traced else ""
    return (
        f"Of {len(rows)} cells {near} are within {_NEAR:.0%} of the bound, {near_cores} within {_NEAR:.0%} of it or of the "
        f"cores' time{hidden}."
    )


def crowds(num_cores: int, device: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for each number of ranks above the number of cores."""
    counts = sorted({row["tp"] * row["dp"] for row in rows}) if device == "cpu" else []
    return [
        f"{ranks} ranks on {num_cores} cores take turns on them; a pass lasts until its slowest rank is done."
        for ranks in counts
        if ranks > num_cores
    ]


def make_sections(rows: Sequence[dict[str, Any]], warnings: Sequence[str]) -> list[Section]:
    if not rows:
        return []
    cells = Table(columns=[*_ARM_COLUMNS, *CELL_COLUMNS], rows=rows, wrong=lambda row: bool(row["faults"]))
    medians = "Medians of passes, each on its slowest rank. GB/s are of one rank, from source to buffer, decoded."
    arms = list({(row["arm"], row["tp"]): row for row in rows}.values())
    sections = [_against_bound(rows, warnings), _times(rows), *_rates(rows)]
    return [
        *sections,
        Section(title="Every cell", words=[medians, _CORES, _OVERLAP], table=cells, wide=True),
        Section(title="Forecast", words=[_FORECAST], table=Table(columns=_FORECAST_COLUMNS, rows=arms), wide=True),
    ]


def _against_bound(rows: Sequence[dict[str, Any]], warnings: Sequence[str]) -> Section:
    series = []
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
    return Section(title=plot.title, words=[verdict(rows), *warnings, _BOUND], svg=draw(plot))


def _times(rows: Sequence[dict[str, Any]]) -> Section:
    own = _of_first_load(rows)
    parts = [
        Part(name=name, number=number, values=[row[f"{name}_s"] * 1e3 for row in own])
        for number, name in enumerate(("fetch", "compute"))
    ]
    title = f"Fetch and compute one after the other, {own[0]['load']}"
    bars = [f"{row['arm']}, tp {row['tp']}" for row in own]
    plot = StackedBars(name="parts", title=title, x_label="ms", bars=bars, parts=parts)
    return Section(title=title, words=["The longer one is the bound."], svg=draw(plot))


def _rates(rows: Sequence[dict[str, Any]]) -> list[Section]:
    """Step time by the source's rate, if there are several rates."""
    throttled = [row for row in _of_first_load(rows) if row["rate_bytes_per_s"]]
    rates = sorted({row["rate_bytes_per_s"] for row in throttled})
    if len(rates) < 2:
        return []
    series = []
    arms = dict.fromkeys((row["source"], row["codec"], row["tp"]) for row in throttled)
    for number, arm in enumerate(arms):
        own = [row for row in throttled if (row["source"], row["codec"], row["tp"]) == arm]
        own.sort(key=lambda row: row["rate_bytes_per_s"])
        x, step = [row["rate_bytes_per_s"] for row in own], [row["step_s"] * 1e3 for row in own]
        wire = [max(row["wire_s"], row["compute_s"]) * 1e3 for row in own]
        series.append(Series(name=f"{arm[0]} {arm[1]}, tp {arm[2]}", number=number, x=x, y=step))
        series.append(Series(name="", number=number, x=x, y=wire, dashed=True))  # without a name: not in the legend
    title = f"By the source's rate, {throttled[0]['load']}"
    ticks = (rates, [f"{rate / 1e6:g}MB/s" for rate in rates])
    plot = Plot(name="rates", title=title, x_label="rate", y_label="step, ms", series=series, ticks=ticks)
    return [Section(title=title, words=["Dashed: bytes / rate, or computing if that is longer."], svg=draw(plot))]


def _of_first_load(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["load"] == rows[0]["load"]]
