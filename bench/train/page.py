"""The tables and plots of ``bench train``: step times by link, predictions, checks, arms against each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.report.page import Item, lines
from tightwire.bench.report.table import Column, Row, Table
from tightwire.bench.train.arms import ARMS

_MOST_PREDICTION_ERROR = 0.15
_STEP = Column("step s", "seconds.p50", ".2f")
_WHERE = (Column("link", "link"), Column("arm", "arm"))
STEP_COLUMNS = (
    *_WHERE,
    _STEP,
    Column("from", "seconds.min", ".2f"),
    Column("to", "seconds.max", ".2f"),
    Column("MB from a node", "node_payload_bytes", ".2f", 1e-6),
    Column("exposed s", "exposed_s", ".2f"),
    Column("computing s", "computing_s", ".2f"),
    Column("predicted s", "predicted_s", ".2f"),
    Column("error", "prediction_error", "+.0%"),
    Column("bound s", "bound_s", ".2f"),
    Column("/ bound", "over_bound", ".2f"),
)
CHECK_COLUMNS = (
    *_WHERE,
    Column("last loss", "losses", lambda losses: f"{losses[-1]:.6f}"),
    Column("loss error", "loss_error", lambda error: f"{error:.1e}" if error else "equal"),
    Column("peak MB", "peak_bytes", ".1f", 1e-6),
    Column("by formula", "formula_peak_bytes", ".1f", 1e-6),
    Column("resident MB", "resident_bytes", ".1f", 1e-6),
    Column("bytes / formula", "payload_over_formula", ".3f"),
)
CSV_COLUMNS = (
    *STEP_COLUMNS,
    Column("node bytes", "node_bytes", "d"),
    Column("wire bytes", "node_wire_bytes", "d"),
    Column("waited s", "waited_s", ".2f"),
    *CHECK_COLUMNS[3:],
)
RATIO_COLUMNS = (
    *_WHERE,
    Column("against", "against"),
    Column("at", "against_link"),
    Column("x as fast", "ratio", ".2f"),
)
_STEP_WORDS = (
    "Medians of steps; a step is as long as on the slowest rank. Exposed: the step without its computing, which is the same "
    "step in the same process without messages. Bound: the longer of computing and of the bytes at the rate of a bulk transfer."
)
_PREDICTION_WORDS = (
    "Predicted from the formulas' bytes, computing without messages, the link's rate and latency as collectives of 1 MiB and "
    "1 KiB measure them, and the engine's scheduling rules. Nothing is fitted to steps."
)
_CHECK_WORDS = (
    "From the first steps, in separate processes without a slow link. Arms that sum rank by rank must have the same losses to "
    "the bit; other exact arms up to rounding. Peak: the growth of resident memory while all freed memory returns to the "
    "system. Resident: while the allocator may keep it, as in timed steps."
)


def step_table(rows: Sequence[Row]) -> Table:
    return Table(
        title="Steps", columns=STEP_COLUMNS, rows=rows, wrong=lambda row: bool(row["faults"]), note=_STEP_WORDS
    )


def check_table(rows: Sequence[Row]) -> Table:
    return Table(
        title="Checks", columns=CHECK_COLUMNS, rows=rows, wrong=lambda row: bool(row["faults"]), note=_CHECK_WORDS
    )


def ratio_table(rows: Sequence[Row]) -> Table:
    return Table(title="Arms against each other", columns=RATIO_COLUMNS, rows=compare_arms(rows))


def make_sections(rows: Sequence[Row]) -> list[Item]:
    predicted = [{**row, "ratio": row["predicted_s"] / row["seconds"]["p50"]} for row in rows if row["predicted_s"]]
    return [
        lines(
            "Step time by link",
            rows,
            by="arm",
            x=Column("link between nodes, Mbit/s", "link_bytes_per_s", ",g", 8e-6),
            y=_STEP,
            dashed=lambda arm: ARMS[arm].peer is not None,
            ticks=True,
            note="Dashed: torch's own.",
        ),
        lines(
            "Predicted over measured",
            predicted,
            by="link",
            x=_STEP,
            y=Column("predicted / measured", "ratio", ".2f"),
            log_y=False,
            joined=False,
            level=1.0,
            from_zero=False,
            note=f"{describe_predictions(rows)}. {_PREDICTION_WORDS}",
        ),
        step_table(rows),
        ratio_table(rows),
        check_table(rows),
    ]


def compare_arms(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """ZeRO++ against zero3, also at four times the bandwidth; sparse sums against dense; arms against torch's.

    ``ratio``: seconds of ``against`` at ``against_link`` / seconds of ``arm`` at ``link``; above 1, ``arm`` is faster.
    """
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    peers = [arm for arm in arms if ARMS[arm].peer]
    pairs = [("zero++", "zero3"), ("zero++", "zero3-flat"), ("zero++", "zero3-by-node"), ("zero3", "zero3-on-demand")]
    pairs += [("dgc", "hybrid"), ("top-k", "hybrid"), ("hybrid-quantized", "hybrid")]
    pairs += [(arm, peer) for peer in peers for arm in arms if arm not in peers]
    links = {row["link"]: row["link_bytes_per_s"] for row in rows}
    places = [(*pair, link, link) for pair in pairs for link in links]
    places += [("zero++", "zero3", slow, fast) for slow in links for fast in links if links[fast] == 4 * links[slow]]
    seconds = {(row["link"], row["arm"]): row["seconds"]["p50"] for row in rows}
    return [
        {
            "link": link,
            "arm": arm,
            "against": other,
            "against_link": other_link,
            "ratio": seconds[other_link, other] / seconds[link, arm],
        }
        for arm, other, link, other_link in places
        if (link, arm) in seconds and (other_link, other) in seconds
    ]


def describe_predictions(rows: Sequence[Row]) -> str:
    errors = [abs(row["prediction_error"]) for row in rows if row["prediction_error"] is not None]
    if not errors:
        return "no predictions"
    within = sum(error <= _MOST_PREDICTION_ERROR for error in errors)
    return f"{within} of {len(errors)} predictions are within {_MOST_PREDICTION_ERROR:.0%}; the worst is off by {max(errors):.0%}"


def describe_setting(facts: Mapping[str, Any]) -> str:
    """Model, ranks and batch in one line."""
    return (
        f"{facts['model']} ({facts['num_parameters'] / 1e6:.1f} M parameters), {facts['dtype']}; {facts['nodes']} nodes of "
        f"{facts['ranks_per_node']} ranks, one thread each; {facts['sequences']} sequences of {facts['sequence_tokens']} "
        "tokens per rank and step"
    )


def describe_link(link: Mapping[str, Any]) -> str:
    rates = link["rates"]
    return (
        f"{link['name']}: {link['bytes_per_s'] * 8 / 1e6:.0f} Mbit/s in a bulk transfer ({link['how']}); collectives of a rank: "
        f"{rates['across_bytes_per_s'] / 1e6:.2f} MB/s across nodes, {rates['inside_bytes_per_s'] / 1e6:.2f} MB/s inside; "
        f"latency {rates['across_round_s'] * 1e3:.1f} and {rates['inside_round_s'] * 1e3:.1f} ms"
    )
