"""Rows of a result as text: the same words on the terminal and on the page."""

from collections.abc import Mapping
from typing import Any

from tightwire.comm.sizes import format_bytes

TTFT_COLUMNS = (*("n", "mean", "std", "p50", "p90", "p99", "ratio [95 %]", "verdict", "x best lossless"),)
OTHER_COLUMNS = (
    *("compute", "codec", "AllReduce", "rest", "sent", "x bound"),
    *("TPOT", "ITL p50", "tokens/s", "error", "as exact"),
)
LEGENDS = (
    (
        "TTFT in ms at the client, from sending to the first text. Ratio: to the baseline, of medians, block by block; below 1 is "
        "faster. Best lossless: what a lossy one has to beat."
    ),
    (
        "Times in ms, medians. AllReduce without coding, waiting for slower ranks included; rest: HTTP, tokenizing, queue, "
        "scheduling, sampling, sending. Sent: by rank 0 for one prompt. X bound: TTFT over compute + codec + bytes / "
        "bandwidth, where the wire's is known. Beside TPOT and tokens/s: times the baseline's. Error: relative RMS of one "
        "AllReduce. As exact: checked answers that are the lossless one's throughout (tokens until the first that is not, "
        "nats by which that is less likely)."
    ),
)
RANDOM_WEIGHTS = (
    "random weights: many tokens are about as likely as the likeliest, so answers part soon, and that they do says "
    "nothing of a trained model"
)
_REST = ("http_s", "tokenize_s", "queue_s", "engine_s", "sampling_s", "send_s")


def ttft_texts(row: Mapping[str, Any]) -> list[str]:
    """Cells of ``TTFT_COLUMNS``."""
    times = row["ttft_s"]
    ratio, best = row["ratio"], row["ratio_to_best_lossless"]
    if row["best_lossless"] == row["arm"]:
        gain = "(the best)"
    else:
        gain = "-" if best is None else f"{1 / best['ratio']:.2f} [{1 / best['high']:.2f}, {1 / best['low']:.2f}]"
    return [
        str(times["n"]),
        *(ms(times[key]) for key in ("mean", "std", "p50", "p90", "p99")),
        "1 (baseline)" if ratio is None else f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
        "" if ratio is None else ratio["verdict"],
        gain,
    ]


def other_texts(row: Mapping[str, Any]) -> list[str]:
    """Cells of ``OTHER_COLUMNS``."""
    parts, bound, agreement = row["parts_s"], row["bound"], row["agreement"]
    return [
        ms(parts["compute_s"]),
        ms(parts["codec_s"]),
        ms(parts["allreduce_s"]),
        ms(sum(parts[part] or 0.0 for part in _REST)),
        format_bytes(round(row["sent_bytes"])),
        "-" if bound is None else f"{bound['ttft_over_bound']:.2f}",
        ms(row["tpot_s"]["p50"], row["tpot_ratio"]),
        "-" if row["itl_s"] is None else ms(row["itl_s"]["p50"]),
        with_ratio(f"{row['tokens_per_s']['p50']:.1f}", row["tokens_per_s_ratio"]),
        "0" if row["lossless"] else f"{row['error']:.2g}",
        "-" if agreement is None else _agreement(agreement),
    ]


def ms(seconds: float | None, ratio: Mapping[str, Any] | None = None) -> str:
    return "-" if seconds is None else with_ratio(f"{seconds * 1e3:,.1f}", ratio)


def with_ratio(text: str, ratio: Mapping[str, Any] | None) -> str:
    return text if ratio is None else f"{text} ({ratio['ratio']:.2f})"


def _agreement(agreement: Mapping[str, Any]) -> str:
    text = f"{agreement['same']}/{agreement['checked']}"
    if agreement["first_difference"] is None:
        return text
    return f"{text} ({agreement['first_difference']}, {agreement['largest_gap_nats']:.2g})"


def describe_setting(result: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    options = result["options"]
    nodes = f" on {result['nodes']} nodes" if result["nodes"] > 1 else ""
    return (
        f"{result['model']} ({result['dtype']} on {result['device']}) over {result['tp']} ranks{nodes}: "
        f"{', '.join(options['algorithms'])} against {options['baseline']}; "
        f"{options['repeats']} random blocks, {options['output_len']} output tokens, seed {result['seed']}"
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
    """What to paste, and why; the lossless one first."""
    lines = []
    for kind, found in zip(("lossless", "lossy"), result["recommended"], strict=False):
        lines += [f"{kind}: {found['command']}", f"  {found['reason']}"]
    if len(result["recommended"]) == 1 and not all(row["lossless"] for row in result["cells"]):
        lines.append(
            "lossy: none is certain to be faster than that" + (" within the budget" if result["over_budget"] else "")
        )
    if result["over_budget"]:
        lines.append(f"not considered, their error is above the budget: {', '.join(result['over_budget'])}")
    return lines
