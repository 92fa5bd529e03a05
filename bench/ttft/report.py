"""Columns, text and page of ``bench ttft``."""

from collections.abc import Mapping, Sequence
from typing import Any

from tightwire.bench.report.page import Item, Text, bars, lines
from tightwire.bench.report.table import Column, Row, Table
from tightwire.comm.sizes import format_bytes


def _interval(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"


def _speed_up(ratio: Mapping[str, Any]) -> str:
    return f"{1 / ratio['ratio']:.2f} [{1 / ratio['high']:.2f}, {1 / ratio['low']:.2f}]"


def _agreement_text(agreement: Mapping[str, Any]) -> str:
    text = f"{agreement['same']}/{agreement['checked']}"
    if agreement["first_difference"] is None:
        return text
    return f"{text} ({agreement['first_difference']}, {agreement['largest_gap_nats']:.2g})"


def _ms(name: str, key: str) -> Column:
    return Column(name, key, ",.1f", 1e3)


_ARM = Column("algorithm", "arm")
_PLACE = (Column("prompt", "prompt_len", "d"), Column("at a time", "concurrency", "d"))
_TIME_PARTS = (
    _ms("compute", "parts_s.compute_s"),
    _ms("codec", "parts_s.codec_s"),
    _ms("AllReduce", "parts_s.allreduce_s"),
    _ms("rest", "rest_s"),
)
_TTFT_COLUMNS = (
    _ARM,
    Column("n", "ttft_s.n", "d"),
    *(_ms(key, f"ttft_s.{key}") for key in ("mean", "std", "p50", "p90", "p99")),
    Column("ratio [95 %]", "ratio", _interval),
    Column("verdict", "ratio.verdict"),
    Column("x best lossless", "ratio_to_best_lossless", _speed_up),
)
_OTHER_COLUMNS = (
    _ARM,
    *_TIME_PARTS,
    Column("sent", "sent_bytes", lambda sent: format_bytes(round(sent))),
    Column("x bound", "bound.ttft_over_bound", ".2f"),
    _ms("TPOT", "tpot_s.p50"),
    Column("(ratio)", "tpot_ratio.ratio", ".2f"),
    _ms("ITL", "itl_s.p50"),
    Column("tokens/s", "tokens_per_s.p50", ".1f"),
    Column("(ratio)", "tokens_per_s_ratio.ratio", ".2f"),
    Column("error", "error", ".2g"),
    Column("as exact", "agreement", _agreement_text),
)
CSV_COLUMNS = (
    *_PLACE,
    *(column for column in (*_TTFT_COLUMNS, *_OTHER_COLUMNS[1:]) if column.key not in ("ratio", "agreement")),
    *(Column(f"ratio {key}", f"ratio.{key}", ".3f") for key in ("ratio", "low", "high")),
)
LEGENDS = (
    (
        "TTFT in ms at the client, from sending to the first text. Ratio: of medians to the baseline, paired by round; below 1 is "
        "faster. X best lossless: speed-up over the fastest lossless AllReduce."
    ),
    (
        "Median times in ms. AllReduce: without coding, including the wait for slower ranks. Rest: HTTP, tokenizing, queue, "
        "scheduling, sampling, sending. Sent: by rank 0 for one prompt. X bound: TTFT over compute + codec + bytes / bandwidth, "
        "where the link's bandwidth is known. Ratio: to the baseline. Error: relative RMS error of one AllReduce. As exact: checked "
        "answers equal to the lossless one (tokens before the first difference; nats by which that token is less likely)."
    ),
)
RANDOM_WEIGHTS = (
    "with random weights many tokens are about equally likely, so differing answers say nothing about a trained model"
)


def recommended_lines(result: Mapping[str, Any]) -> list[str]:
    """The command lines to paste and the reasons, lossless first."""
    found = []
    for kind, each in zip(("lossless", "lossy"), result["recommended"], strict=False):
        found += [f"{kind}: {each['command']}", f"  {each['reason']}"]
    if len(result["recommended"]) == 1 and not all(row["lossless"] for row in result["cells"]):
        found.append("lossy: none is certainly faster")
    return found


def describe_setting(result: Mapping[str, Any]) -> str:
    """Model, ranks, arms and rounds in one line."""
    options = result["options"]
    nodes = f" on {result['nodes']} nodes" if result["nodes"] > 1 else ""
    return (
        f"{result['model']} ({result['dtype']} on {result['device']}) over {result['tp']} ranks{nodes}: "
        f"{', '.join(options['algorithms'])} against {options['baseline']}; "
        f"{options['repeats']} random rounds, {options['output_len']} output tokens, seed {result['seed']}"
    )


def describe_link(link: Mapping[str, Any] | None) -> str:
    if link is None:
        return "the machine's own"
    rate = link["measured_bytes_per_s"]
    measured = "" if rate is None else f", {rate * 8 / 1e6:,.1f} Mbit/s measured"
    how = "by the kernel, between network namespaces" if link["emulation"] == "namespaces" else "in user space"
    reason = f" ({link['reason']})" if link["reason"] else ""
    return f"{link['name']}, emulated {how}{reason}{measured}, latency {link['latency_s'] * 1e6:g} us"


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Two for each cell."""
    found = []
    for cell in dict.fromkeys((row["prompt_len"], row["concurrency"]) for row in result["cells"]):
        rows = [row for row in result["cells"] if (row["prompt_len"], row["concurrency"]) == cell]
        title = f"{cell[0]} prompt tokens, {cell[1]} at a time"
        found.append(Table(title=f"{title}: TTFT, ms", columns=_TTFT_COLUMNS, rows=rows))
        found.append(Table(title=f"{title}: parts of TTFT, decode, accuracy", columns=_OTHER_COLUMNS, rows=rows))
    return found


def make_sections(result: Mapping[str, Any]) -> list[Item]:
    """The recommendation, plots, then every number. The bars are the picture in the README."""
    rows, text = result["cells"], recommended_lines(result)
    if result["random_weights"]:
        text.append(RANDOM_WEIGHTS)
    lossless = {row["arm"] for row in rows if row["lossless"]}
    items: list[Item] = [Text(title="Recommended", lines=text)] if text else []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        own = [{**row, "bar": f"{row['prompt_len']} {row['arm']}"} for row in rows if row["concurrency"] == concurrency]
        title, y = f"TTFT by prompt length, {concurrency} at a time", _ms("median ms", "ttft_s.p50")
        prompt = Column("prompt tokens", "prompt_len", "d")
        items.append(
            lines(
                title, own, by="arm", x=prompt, y=y, dashed=lambda arm: arm not in lossless, note="Dashed: quantized."
            )
        )
        title = f"Parts of TTFT, {concurrency} at a time"
        note = "Median of each part. AllReduce includes the wait for slower ranks and, in fused kernels, coding."
        bar = Column("prompt tokens and AllReduce", "bar")
        items.append(bars(title, own, label=bar, parts=_TIME_PARTS, x_label="ms inside the server", note=note))
    if any(row["ratio_to_best_lossless"] for row in rows if not row["lossless"]):
        items.append(_speed_and_error([row for row in rows if not row["lossless"]]))
    for title, legend, columns in zip(
        ("TTFT, ms", "Parts of TTFT, decode, accuracy"), LEGENDS, (_TTFT_COLUMNS, _OTHER_COLUMNS), strict=True
    ):
        items.append(Table(title=title, columns=[*_PLACE, *columns], rows=rows, note=legend, strong=_is_faster))
    return items


def _is_faster(row: Row) -> bool:
    return row["ratio"] is not None and row["ratio"]["verdict"] == "faster"


def _speed_and_error(rows: Sequence[Row]) -> Item:
    ratio, low, high = (
        Column("TTFT / best lossless", f"ratio_to_best_lossless.{key}", ".2f") for key in ("ratio", "low", "high")
    )
    return lines(
        "Speed and error",
        rows,
        by="arm",
        x=Column("relative RMS error of one AllReduce", "error", ".2g"),
        y=ratio,
        interval=(low, high),
        log_y=False,
        joined=False,
        level=1.0,
        note="A point for each cell. Lower is faster, further left is more exact.",
    )
