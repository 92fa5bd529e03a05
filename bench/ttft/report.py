"""The tables and the page of ``bench ttft``, made from the rows of a result."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tightwire.bench.report.html import Section
from tightwire.bench.report.plots import Part, Plot, Series, StackedBars, lines, plot_section
from tightwire.bench.report.table import Column, Row, Table
from tightwire.bench.ttft.summary import PARTS
from tightwire.comm.sizes import format_bytes


def _ratio(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _speed_up(ratio: Mapping[str, Any]) -> str:
    return f"{1 / ratio['ratio']:.2f} [{1 / ratio['high']:.2f}, {1 / ratio['low']:.2f}]"


def _agreement(agreement: Mapping[str, Any]) -> str:
    text = f"{agreement['same']}/{agreement['checked']}"
    if agreement["first_difference"] is None:
        return text
    return f"{text} ({agreement['first_difference']}, {agreement['largest_gap_nats']:.2g})"


def _ms(name: str, key: str) -> Column:
    return Column(name, key, ",.1f", 1e3)


_ARM = Column("algorithm", "arm")
_PLACE = (Column("prompt", "prompt_len", "d"), Column("at a time", "concurrency", "d"))
TTFT_COLUMNS = (
    _ARM,
    Column("n", "ttft_s.n", "d"),
    *(_ms(key, f"ttft_s.{key}") for key in ("mean", "std", "p50", "p90", "p99")),
    Column("ratio [95 %]", "ratio", _ratio),
    Column("verdict", "ratio.verdict"),
    Column("x best lossless", "ratio_to_best_lossless", _speed_up),
)
OTHER_COLUMNS = (
    _ARM,
    _ms("compute", "parts_s.compute_s"),
    _ms("codec", "parts_s.codec_s"),
    _ms("AllReduce", "parts_s.allreduce_s"),
    _ms("rest", "rest_s"),
    Column("sent", "sent_bytes", lambda sent: format_bytes(round(sent))),
    Column("x bound", "bound.ttft_over_bound", ".2f"),
    _ms("TPOT", "tpot_s.p50"),
    Column("(ratio)", "tpot_ratio.ratio", ".2f"),
    _ms("ITL", "itl_s.p50"),
    Column("tokens/s", "tokens_per_s.p50", ".1f"),
    Column("(ratio)", "tokens_per_s_ratio.ratio", ".2f"),
    Column("error", "error", ".2g"),
    Column("as exact", "agreement", _agreement),
)
CSV_COLUMNS = [
    Column(name, name)
    for name in (
        *("prompt_len", "concurrency", "arm", "round", "place", "ttft_s", "tpot_s", "e2e_s", "decode_comm_share"),
        *("server_ttft_s", *PARTS),
    )
]
LEGENDS = (
    (
        "TTFT in ms at the client, from sending to the first text. Ratio: to the baseline, of medians, paired by round; "
        "below 1 is faster. X best lossless: speed-up over the fastest lossless one."
    ),
    (
        "Median times in ms. AllReduce: without coding, with waiting for slower ranks. Rest: HTTP, tokenizing, queue, "
        "scheduling, sampling, sending. Sent: by rank 0 for one prompt. X bound: TTFT over compute + codec + bytes / "
        "bandwidth, where the wire's is known. Ratio: to the baseline. Error: relative RMS of one AllReduce. As exact: "
        "checked answers equal to the lossless one's (tokens before the first difference, nats by which that token is less "
        "likely)."
    ),
)
RANDOM_WEIGHTS = "random weights: many tokens are about equally likely, so answers differ soon, which says nothing about a trained model"


def describe_setting(result: Mapping[str, Any]) -> str:
    """What is measured, in one line."""
    options = result["options"]
    nodes = f" on {result['nodes']} nodes" if result["nodes"] > 1 else ""
    return (
        f"{result['model']} ({result['dtype']} on {result['device']}) over {result['tp']} ranks{nodes}: "
        f"{', '.join(options['algorithms'])} against {options['baseline']}; "
        f"{options['repeats']} random rounds, {options['output_len']} output tokens, seed {result['seed']}"
    )


def describe_link(link: Mapping[str, Any] | None) -> str:
    """The wire in words."""
    if link is None:
        return "the machine's own"
    rate = link["measured_bytes_per_s"]
    measured = "" if rate is None else f", {rate * 8 / 1e6:,.1f} Mbit/s measured"
    how = "by the kernel, between network namespaces" if link["emulation"] == "namespaces" else "in user space"
    reason = f" ({link['reason']})" if link["reason"] else ""
    return f"{link['name']}, emulated {how}{reason}{measured}, latency {link['latency_s'] * 1e6:g} us"


def recommended_lines(result: Mapping[str, Any]) -> list[str]:
    """The command lines to paste and the reasons, lossless first."""
    found = []
    for kind, each in zip(("lossless", "lossy"), result["recommended"], strict=False):
        found += [f"{kind}: {each['command']}", f"  {each['reason']}"]
    if len(result["recommended"]) == 1 and not all(row["lossless"] for row in result["cells"]):
        found.append("lossy: none is certain to be faster" + (" within the budget" if result["over_budget"] else ""))
    if result["over_budget"]:
        found.append(f"not considered, their error is above the budget: {', '.join(result['over_budget'])}")
    return found


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Two for each cell."""
    found = []
    for cell in dict.fromkeys((row["prompt_len"], row["concurrency"]) for row in result["cells"]):
        rows = [row for row in result["cells"] if (row["prompt_len"], row["concurrency"]) == cell]
        title = f"{cell[0]} prompt tokens, {cell[1]} at a time"
        found.append(Table(title=f"{title}: TTFT, ms", columns=TTFT_COLUMNS, rows=rows))
        found.append(Table(title=f"{title}: where it goes", columns=OTHER_COLUMNS, rows=rows))
    return found


def make_sections(result: Mapping[str, Any]) -> list[Section]:
    """The recommendation, plots by concurrency, by message size and by error, then every number."""
    rows, words = result["cells"], recommended_lines(result)
    if result["random_weights"]:
        words.append(RANDOM_WEIGHTS)
    sections = [Section(title="Recommended", words=words, wide=True)] if words else []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        own = [row for row in rows if row["concurrency"] == concurrency]
        sections += [plot_section(ttft_plot(own, concurrency), _TTFT_WORDS), _parts(own, concurrency)]
    if result["raw"]["traced_all_reduces"]:
        sections.append(_by_size(result["raw"]["traced_all_reduces"]))
    lossy = [row for row in rows if not row["lossless"] and row["ratio_to_best_lossless"]]
    if lossy:
        sections.append(_speed_and_error(lossy, [row["arm"] for row in rows]))
    for title, legend, columns in zip(
        ("TTFT, ms", "Other numbers"), LEGENDS, (TTFT_COLUMNS, OTHER_COLUMNS), strict=True
    ):
        table = Table(columns=[*_PLACE, *columns], rows=rows, strong=_is_faster)
        sections.append(Section(title=title, words=[legend], table=table, wide=True))
    return sections


def _is_faster(row: Row) -> bool:
    return row["ratio"] is not None and row["ratio"]["verdict"] == "faster"


_TTFT_WORDS = "Bars: the 95 % interval of the ratio to the baseline. Dashed: quantized."


def ttft_plot(rows: Sequence[Row], concurrency: int) -> Plot:
    """Median TTFT by prompt length, with the bootstrap interval of the ratio to the baseline around each median."""
    series = []
    for number, name in enumerate(dict.fromkeys(row["arm"] for row in rows)):
        own = [row for row in rows if row["arm"] == name]
        y = [row["ttft_s"]["p50"] * 1e3 for row in own]
        ratios = [row["ratio"] or {"ratio": 1.0, "low": 1.0, "high": 1.0} for row in own]
        low, high = (
            [value * each[end] / each["ratio"] for value, each in zip(y, ratios, strict=True)]
            for end in ("low", "high")
        )
        x, dashed = [row["prompt_len"] for row in own], not own[0]["lossless"]
        series.append(Series(name=name, number=number, x=x, y=y, dashed=dashed, low=low, high=high))
    lengths = sorted({row["prompt_len"] for row in rows})
    return Plot(
        name=f"length-{concurrency}",
        title=f"TTFT by prompt length, {concurrency} at a time",
        x_label="prompt tokens",
        y_label="median ms",
        series=series,
        ticks=(lengths, [str(length) for length in lengths]),
    )


def _parts(rows: Sequence[Row], concurrency: int) -> Section:
    parts = [
        Part(name=part.removesuffix("_s"), number=i, values=[(row["parts_s"][part] or 0.0) * 1e3 for row in rows])
        for i, part in enumerate(PARTS)
    ]
    plot = StackedBars(
        name=f"parts-{concurrency}",
        title=f"Where TTFT goes, {concurrency} at a time",
        x_label="ms inside the server",
        bars=[f"{row['prompt_len']} {row['arm']}" for row in rows],
        parts=parts,
    )
    fused = any(row["parts_s"]["codec_s"] is None for row in rows)
    coding = "; so is coding, in fused kernels." if fused else "."
    return plot_section(plot, f"Medians of each part. AllReduce: waiting for slower ranks is included{coding}")


def _by_size(traces: Sequence[Row]) -> Section:
    times: dict[tuple[str, int], list[float]] = {}
    for trace in traces:
        times.setdefault((trace["arm"], trace["message_bytes"]), []).append(trace["seconds"])
    rows = [{"arm": arm, "size": size, "seconds": median(seconds)} for (arm, size), seconds in times.items()]
    size, seconds = Column("message size", "size", format_bytes), Column("median us", "seconds", ".1f", 1e6)
    plot = lines("size", "AllReduce by message size", rows, by="arm", x=size, y=seconds, ticks=True)
    return plot_section(plot, "Prompt rows on rank 0, coding included, recorded in the turns that prove what was sent.")


def _speed_and_error(rows: Sequence[Row], names: Sequence[str]) -> Section:
    """Speed-up over the best lossless arm against error."""
    series = []
    for number, name in enumerate(dict.fromkeys(names)):
        own = [row for row in rows if row["arm"] == name]
        ratios = [row["ratio_to_best_lossless"] for row in own]
        if own:
            series.append(
                Series(
                    name=name,
                    number=number,
                    x=[row["error"] for row in own],
                    y=[1 / ratio["ratio"] for ratio in ratios],
                    low=[1 / ratio["high"] for ratio in ratios],
                    high=[1 / ratio["low"] for ratio in ratios],
                )
            )
    plot = Plot(
        name="error",
        title="Speed and error",
        x_label="relative RMS error of one AllReduce",
        y_label="speed-up over the best lossless one",
        series=series,
        log_y=False,
        joined=False,
        line_y=1.0,
    )
    return plot_section(plot, "A point for each cell. Higher is faster, further left is more exact.")
