"""Numbers of ``bench quality`` as people read them, the same in the terminal and on the page."""

from collections.abc import Mapping
from typing import Any

from tightwire.bench.quality.arms import MIX

COLUMNS = (*("bytes", "share", "ppl", "ppl +%", "KL", "KL p99", "top-1 %", "greedy", "o dB", "down dB"),)
LEGEND = (
    "bytes: that a rank sends for a prompt token, mean of the ranks, and their share of the lossless sum's; ppl: perplexity, "
    "and its increase with a 95 % interval; KL(exact || arm) of next-token distributions in nats, mean and 99th percentile; "
    "top-1: how often the most likely token is the same; greedy: tokens before a greedy text differs, median, of all; "
    "dB: signal to noise of o_proj's and down_proj's sums."
)


def cell_texts(row: Mapping[str, Any]) -> list[str]:
    """One arm at one world size, under ``COLUMNS``."""
    greedy = row["greedy"]
    return [
        f"{row['bytes_per_token']:,.0f}",
        f"{100 * row['bytes_share']:.1f} %",
        f"{row['perplexity']:.3f}",
        _delta(row),
        f"{row['kl_mean']:.1e}",
        f"{row['kl_p99']:.1e}",
        f"{100 * row['top1_agreement']:.2f}",
        "-" if greedy is None else _same(greedy),
        *(db_text(row["sqnr_db"][site]["total"]) for site in ("o_proj", "down_proj")),
    ]


def exact_texts(row: Mapping[str, Any]) -> list[str]:
    """The exact model, under ``COLUMNS``."""
    return ["", "100 %", f"{row['perplexity']:.3f}", *[""] * (len(COLUMNS) - 3)]


def describe_setting(result: Mapping[str, Any]) -> str:
    """What was compared on what, in a line."""
    dtype, weights = result["dtype"], result["weights"]
    numbers = dtype if weights == dtype else f"{dtype} (weights in {weights})"
    return (
        f"{result['model']} in {numbers}, {result['tokens']:,} tokens of {result['text']} in windows of "
        f"{result['window']}, ranks as threads; exact is the lossless sum of the same number of ranks"
    )


def describe_choice(choice: Mapping[str, Any]) -> str:
    """What the budget came to."""
    sizes = ", ".join(map(str, choice["world_sizes"]))
    if choice["algorithm"] is None:
        return f"within {choice['budget']} at {sizes} ranks: none of these; all but lossless ones lose more"
    name = choice["algorithm"]
    flag = "the mix" if name == MIX else f"--allreduce {name}"
    if name.startswith("policy:"):
        flag = f"--comm-policy {name.removeprefix('policy:')}"
    return f"within {choice['budget']} at {sizes} ranks, the cheapest is {flag}"


def _delta(row: Mapping[str, Any]) -> str:
    text = f"{100 * row['perplexity_delta']:+.3f}"
    if row["perplexity_delta_low"] is None:
        return text
    return f"{text} ±{50 * (row['perplexity_delta_high'] - row['perplexity_delta_low']):.3f}"


def _same(greedy: Mapping[str, Any]) -> str:
    return f"{greedy['median_same_tokens']:g}/{greedy['tokens']}"


def db_text(db: float | None) -> str:
    return "none" if db is None else f"{db:.1f}"
