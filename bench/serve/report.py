"""How a result is shown and kept: a table for eyes, JSON with every raw sample, CSV with one row per request, a page."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tightwire.bench.client import Sample
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.serve.load import Arm

SCHEMA = "tightwire.bench.serve/1"

LATENCIES = (
    ("ttft_s", "TTFT", "first text"),
    ("tpot_s", "TPOT", "later tokens"),
    ("itl_s", "ITL", "gaps in text"),
    ("e2e_s", "E2E", "whole answer"),
)
_MANY = 100  # of fewer samples, the 99th percentile is a mean of the two slowest, weighted
STATISTICS = ("n", "mean", "std", "p50", "p90", "p95", "p99")
_CSV_COLUMNS = [
    *("arm", "load", "index", "sent_s", "late_s", "ttft_s", "tpot_s", "e2e_s"),
    *("num_prompt", "num_cached", "num_generated", "finish_reason", "error"),
]


def show(console: Console, summary: dict[str, Any], doubts: Sequence[str]) -> None:
    """Print one arm: latencies in milliseconds, then rates, then what to be careful about."""
    counts = f"{summary['succeeded']}/{summary['requested']} requests in {summary['duration_s']:.2f} s"
    table = Table(title=f"{summary['load']}: {counts}", title_justify="left", title_style="bold")
    table.add_column("ms")
    for name in STATISTICS:
        table.add_column(name, justify="right")
    for key, label, meaning in LATENCIES:
        table.add_row(f"{label} [dim]{meaning}[/dim]", *latency_cells(summary[key]))
    console.print(table)
    if few := thin_tail(summary):
        console.print(few, style="dim", markup=False, soft_wrap=True)
    for line in rate_lines(summary):
        console.print(line, soft_wrap=True)
    for error, count in summary["errors"].items():
        console.print(f"failed {count} times: {error}", style="red", markup=False, soft_wrap=True)
    for doubt in [*doubts, *([f"stopped early: {summary['stopped']}"] if summary["stopped"] else [])]:
        console.print(f"note: {doubt}", style="yellow", markup=False, soft_wrap=True)
    console.print()


def thin_tail(summary: dict[str, Any]) -> str | None:
    """What to know of p99 where requests are few; None where they are not."""
    if not 0 < summary["succeeded"] < _MANY:
        return None
    return (
        f"p99 of {summary['succeeded']} requests is hardly more than their slowest; for a tail measure {_MANY} or more"
    )


def latency_cells(distribution: dict[str, float] | None) -> list[str]:
    """Milliseconds under ``STATISTICS``."""
    if distribution is None:
        return ["0", *["-"] * (len(STATISTICS) - 1)]
    return [str(distribution["n"]), *(f"{distribution[name] * 1e3:,.1f}" for name in STATISTICS[1:])]


def rate_lines(summary: dict[str, Any]) -> list[str]:
    """Throughput in words, and the goodput where there are limits."""
    total = summary["total_tokens_per_s"]
    in_all = "" if total is None else f"{total:.1f} tokens/s in all, "
    rates = (
        f"{summary['output_tokens_per_s']:.1f} output tokens/s, {in_all}"
        f"{summary['requests_per_s']:.2f} requests/s, {summary['mean_in_flight']:.1f} in flight on average"
    )
    goodput = summary["goodput"]
    if goodput is None:
        return [rates]
    limits = ", ".join(f"{name.removesuffix('_s')} {limit * 1e3:g} ms" for name, limit in goodput["slo"].items())
    good = f"{goodput['share']:.1%} of the requests, {goodput['requests_per_s']:.2f} a second, met {limits}"
    return [rates, good]


def keep_raw(files: ResultFiles, result: dict[str, Any], arms: Sequence[Arm]) -> None:
    """JSON and CSV: quick enough for between two arms."""
    samples = [[_plain(sample) for sample in arm.samples] for arm in arms]
    full = [{**summary, "samples": raw} for summary, raw in zip(result["arms"], samples, strict=True)]
    files.write_json({**result, "arms": full})
    files.write_csv(
        _CSV_COLUMNS,
        (
            {"arm": number, "load": arm.load.name, **entry}
            for number, (arm, raw) in enumerate(zip(arms, samples, strict=True))
            for entry in raw
        ),
    )


def keep(files: ResultFiles, result: dict[str, Any], arms: Sequence[Arm]) -> None:
    """Everything, the page too."""
    # Matplotlib takes half a second to import, belongs to an extra, and is of use only here.
    from tightwire.bench.serve.page import make_page

    keep_raw(files, result, arms)
    files.write_html(make_page(result, arms))


def _plain(sample: Sample) -> dict[str, Any]:
    return {**asdict(sample), "tpot_s": sample.tpot_s}
