"""What ``bench stream`` calls things, on the terminal and on its page."""

from collections.abc import Sequence
from typing import Any

COLUMNS = (
    "fetch ms",
    "GB/s",
    "compute ms",
    "step ms",
    "/bound",
    "/source",
    "/cores",
    "/wire",
    "overlap",
    "x none",
    "tokens/s",
)
_NEAR, _HIDDEN = 0.1, 0.95  # asked of a cell: so near to its bound, so much of the shorter part hidden

FORECASTS = ("TTFT of 512, s", "as much computing as fetching at")
BOUND = (
    "The bound is the longer of fetch (all streamed layers brought in, nothing computed) and compute (the same step with "
    "resident weights), both measured in turns with the step, in the same processes. /bound is the step over it; /source over what "
    "the source takes with nothing of ours around it (plain copies, reads, or bare gathers of a pass's bytes), or the computing; "
    "/wire, where it was slowed down, over what the bytes take at that rate and nothing else, or the computing. "
    "No more than two layers, which the buffers hold, can come while head and embedding are computed: where fetch and compute "
    "take about as long, a step is longer than either."
)
CORES = (
    "Where no device of its own moves the bytes, copying and decoding take the cores' time: /cores is against the bound "
    "or, if that is longer, the core seconds that fetch and compute used, shared out over all cores. Memory's bandwidth, "
    "which both share as well, is in neither."
)
OVERLAP = (
    "Overlap is (fetch + compute - step) / min(fetch, compute) from the buffers' trace of each step, on the rank that hid "
    "least: time on the clock, whatever it was slowed down by. On CUDA the trace tells nothing of it."
)
FORECAST = (
    "TTFT is a prompt of 512 tokens in one step: the longer of its computing, measured with resident weights, and one fetch. "
    "From so many rows in a step on, computing is what takes longest."
)


CROWD = (
    "{ranks} ranks on {cores} cores take turns on them. All begin a pass together, and it ends with the last: what is waited for "
    "a core counts."
)


def describe_setting(facts: dict[str, Any]) -> str:
    """Model, numbers and layers in one line."""
    layers = f"{facts['stream_layers']} of {facts['num_layers']} layers streamed"
    replicas = f"; peers: {facts['dp']} replicas" if facts["dp"] > 1 else ""
    threads = "1 thread" if facts["threads"] == 1 else f"{facts['threads']} threads"
    return f"{facts['model']}, {facts['weights']}, {layers}; {facts['device']}, {threads} a rank; {facts['context']} tokens of context{replicas}"


def arm_text(row: dict[str, Any]) -> str:
    """Its way: a prepared folder's reads are around the page cache (direct), or behind one that was dropped."""
    rate, io = row["rate_bytes_per_s"], row["io"]
    return " ".join(
        [row["source"], *([f"({io})"] if io else []), row["codec"], *([f"{rate / 1e6:g}MB/s"] if rate else [])]
    )


def load_text(row: dict[str, Any]) -> str:
    return f"{'batch' if row['step_kind'] == 'decode' else 'prompt'} {row['rows']}"


def cell_texts(row: dict[str, Any]) -> list[str]:
    """The row under ``COLUMNS``."""
    return [
        _ms(row["fetch_s"]),
        f"{row['bytes_per_s'] / 1e9:.3f}",
        _ms(row["compute_s"]),
        _ms(row["seconds"]["p50"]),
        f"{row['over_bound']:.3f}",
        _ratio(row["over_source_bound"]),
        f"{row['over_cores_bound']:.3f}",
        _ratio(row["over_wire_bound"]),
        "-" if row["overlap"] is None else f"{row['overlap']:.1%}",
        "-" if row["speed_up_over_none"] is None else f"{row['speed_up_over_none']:.2f}",
        f"{row['tokens_per_s']:,.1f}",
    ]


def forecast_texts(row: dict[str, Any]) -> list[str]:
    """The row under ``FORECASTS``; the same for all kinds of steps of an arm."""
    return [f"{row['ttft_s']:.2f}", f"{row['break_even_rows']:,.0f} rows"]


def forecast_line(row: dict[str, Any]) -> str:
    """The same in words."""
    ttft, rows = forecast_texts(row)
    return f"a prompt of 512 tokens takes {ttft} s; computing takes as long as fetching at {rows} a step"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """How many of the cells keep what streaming is to keep."""
    near = sum(row["over_bound"] <= 1 + _NEAR for row in rows)
    near_cores = sum(row["over_cores_bound"] <= 1 + _NEAR for row in rows)
    traced = [row["overlap"] for row in rows if row["overlap"] is not None]
    hidden = f"; {sum(overlap >= _HIDDEN for overlap in traced)} hide {_HIDDEN:.0%} or more" if traced else ""
    return (
        f"Of {len(rows)} cells {near} are within {_NEAR:.0%} of the bound, {near_cores} within {_NEAR:.0%} of it or of the "
        f"cores' time{hidden}."
    )


def crowds(result: dict[str, Any]) -> list[str]:
    """A line for each number of ranks that is more than there are cores."""
    cores = result["environment"]["usable_cores"]
    counts = sorted({row["tp"] * row["dp"] for row in result["cells"]}) if result["device"] == "cpu" else []
    return [CROWD.format(ranks=ranks, cores=cores) for ranks in counts if ranks > cores]


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
