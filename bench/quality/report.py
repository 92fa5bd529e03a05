"""Prints a result of ``bench quality`` and formats its cells: one table for each world size."""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tightwire.bench.quality.arms import EXACT, MIX
from tightwire.bench.report.table import Column
from tightwire.bench.report.table import Table as TextTable

COLUMNS = (*("bytes", "share", "ppl", "ppl +%", "KL", "KL p99", "top-1 %", "greedy", "o dB", "down dB"),)
LEGEND = (
    "bytes: that a rank sends for a prompt token, mean of the ranks, and their share of the lossless sum's; ppl: perplexity, "
    "and its increase with a 95 % interval; KL(exact || arm) of next-token distributions in nats, mean and 99th percentile; "
    "top-1: how often the most likely token is the same; greedy: tokens before a greedy text differs, median, of all; "
    "dB: signal to noise of o_proj's and down_proj's sums."
)


def cell_texts(row: Mapping[str, Any]) -> list[str]:
    """The cells of one arm at one world size, in the order of ``COLUMNS``."""
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
    """The cells of the exact model, in the order of ``COLUMNS``."""
    return ["", "100 %", f"{row['perplexity']:.3f}", *[""] * (len(COLUMNS) - 3)]


def describe_setting(result: Mapping[str, Any]) -> str:
    """Describe model, text and ranks in one line."""
    dtype, weights = result["dtype"], result["weights"]
    numbers = dtype if weights == dtype else f"{dtype} (weights in {weights})"
    return (
        f"{result['model']} in {numbers}, {result['tokens']:,} tokens of {result['text']} in windows of "
        f"{result['window']}, ranks as threads; exact is the lossless sum of the same number of ranks"
    )


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Describe the arm that the budget selected."""
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


_CSV_COLUMNS = [
    *("world_size", "algorithm", "bytes_per_token", "bytes_share", "tokens", "perplexity", "perplexity_delta"),
    *("perplexity_delta_low", "perplexity_delta_high", "kl_mean", "kl_p50", "kl_p99", "kl_max", "top1_agreement"),
    *("greedy_median_same_tokens", "greedy_never_differs"),
    *(f"{site}_sqnr_{leg}_db" for site in ("o_proj", "down_proj") for leg in ("total", "reduce", "gather")),
]


def show_head(console: Console, result: Mapping[str, Any]) -> None:
    console.print(describe_setting(result), soft_wrap=True)
    console.print(LEGEND + "\n", soft_wrap=True)


def show_estimate(console: Console, seconds: float, num_cores: int) -> None:
    """Print the estimated time of the whole run."""
    words = f"about {max(1, round(seconds / 60))} min on {num_cores} cores; fewer --tokens take less"
    console.print(words + "\n", soft_wrap=True)


def show_world_size(console: Console, result: Mapping[str, Any], world_size: int) -> None:
    """Print the table of one world size."""
    table = Table(
        title=f"{world_size} ranks", title_justify="left", title_style="bold", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("algorithm", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["exact"]:
        if row["world_size"] == world_size:
            table.add_row(EXACT, *exact_texts(row))
    for row in result["cells"]:
        if row["world_size"] == world_size:
            table.add_row(row["algorithm"], *cell_texts(row))
    console.print(table)
    console.print()


def show_findings(console: Console, result: Mapping[str, Any]) -> None:
    """Print the chosen arm and the result of the search."""
    for words in finding_words(result):
        console.print(words, style="bold", soft_wrap=True)


def finding_words(result: Mapping[str, Any]) -> list[str]:
    words = [describe_choice(result["choice"])] if result["choice"] else []
    if (search := result["search"]) is not None:
        words.append(
            f"mix of at most {search['bytes_of']}'s bytes, found with {search['tokens']:,} other tokens at "
            f"{search['world_size']} ranks: KL {search['predicted_kl']:.2e} predicted"
        )
        words += [
            f"at {found['world_size']} ranks the mix's KL is {found['kl_ratio']:.3f} ({found['kl_ratio_low']:.3f} to "
            f"{found['kl_ratio_high']:.3f}) of {found['algorithm']}'s, with {found['bytes_ratio']:.3f} of its bytes"
            for found in result["mix_against"]
        ]
    if result["policy_file"]:
        words.append(f"written: serve --comm-policy {result['policy_file']}")
    return words


def csv_table(result: Mapping[str, Any]) -> TextTable:
    columns = [Column(name, name) for name in _CSV_COLUMNS]
    return TextTable(columns=columns, rows=[_csv_row(row) for row in result["cells"]])


def _csv_row(row: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(row)
    if row["greedy"] is not None:
        flat["greedy_median_same_tokens"] = row["greedy"]["median_same_tokens"]
        flat["greedy_never_differs"] = row["greedy"]["never_differs"]
    for site, legs in row["sqnr_db"].items():
        flat |= {f"{site}_sqnr_{leg}_db": legs[leg] for leg in ("total", "reduce", "gather")}
    return flat
