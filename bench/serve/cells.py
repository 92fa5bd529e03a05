"""Turns the samples of one load into a cell: distributions of latencies, rates, and reasons to doubt them."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tightwire.bench.client import Sample
from tightwire.bench.report.statistics import describe, neighbour_batch
from tightwire.bench.report.table import Column, Row, Table
from tightwire.bench.serve.load import LoadRun

LATENCIES = {
    "ttft_s": "TTFT first text",
    "tpot_s": "TPOT later tokens",
    "itl_s": "ITL gaps in text",
    "e2e_s": "E2E whole answer",
}
_FEW_REQUESTS = 100  # with fewer, the 99th percentile is a weighted mean of the two slowest


def summarize(run: LoadRun, expected_generated: int | None = None) -> dict[str, Any]:
    """The cell of one load. ``expected_generated``: tokens of each request, if all run to that length."""
    ok = [sample for sample in run.samples if sample.error is None]
    num_prompt = sum(sample.num_prompt for sample in ok)
    num_generated = sum(sample.num_generated for sample in ok)
    counted = all(sample.usage for sample in ok)
    seconds = run.duration_s or math.inf
    in_flight = sum(sample.e2e_s or 0.0 for sample in ok) / seconds
    latencies = {name: [value for sample in ok if (value := getattr(sample, name)) is not None] for name in LATENCIES}
    latencies["itl_s"] = [gap for gaps in latencies["itl_s"] for gap in gaps]
    return {
        "name": run.load.name,
        "concurrency": run.load.concurrency,
        "request_rate": run.load.request_rate,
        "temperature": run.load.temperature,
        "requested": run.num_requests,
        "succeeded": len(ok),
        "failed": len(run.samples) - len(ok),
        "stopped": run.stopped,
        "duration_s": run.duration_s,
        "prompt_tokens": num_prompt if counted else None,
        "cached_tokens": sum(sample.num_cached for sample in ok) if counted else None,
        "generated_tokens": num_generated,
        "requests_per_s": len(ok) / seconds,
        "output_tokens_per_s": num_generated / seconds,
        "total_tokens_per_s": (num_prompt + num_generated) / seconds if counted else None,
        "mean_in_flight": in_flight,
        **{name: describe(values) or None for name, values in latencies.items()},
        "errors": dict(Counter(sample.error for sample in run.samples if sample.error).most_common()),
        "doubts": doubts(run, expected_generated),
        # Requests that are in flight together share the server's steps, so their times are not independent.
        "batch": max(run.load.concurrency or round(in_flight) or 1, neighbour_batch(len(run.samples))),
        "samples": _samples_by_index(run.samples),
        "raw": [{**asdict(sample), "tpot_s": sample.tpot_s} for sample in run.samples],
    }


def _samples_by_index(samples: Sequence[Sample]) -> dict[str, list[float | None]]:
    """Samples by the requests' indices, None for a failed one, so that runs with the same prompts are compared in pairs."""
    by_index: list[Sample | None] = [None] * (1 + max((sample.index for sample in samples), default=-1))
    for sample in samples:
        by_index[sample.index] = sample if sample.error is None else None
    found: dict[str, list[float | None]] = {
        name: [None if sample is None else getattr(sample, name) for sample in by_index]
        for name in ("ttft_s", "tpot_s", "e2e_s")
    }
    # ITL: a request's mean gap, because single gaps are not independent.
    found["itl_s"] = [statistics.fmean(sample.itl_s) if sample and sample.itl_s else None for sample in by_index]
    return found


def doubts(run: LoadRun, expected_generated: int | None = None) -> list[str]:
    """Reasons not to trust the figures of the load; empty when there are none."""
    ok = [sample for sample in run.samples if sample.error is None]
    found: list[str] = []
    if any(not sample.usage for sample in ok):
        found.append("the server sends no usage: tokens are counted as events with text, prompt tokens are unknown")
    if mute := sum(sample.ttft_s is None for sample in ok):
        found.append(f"{mute} of {len(ok)} answers have no text and so no TTFT")
    if cached := sum(sample.num_cached for sample in ok):
        found.append(f"a prefix cache supplied {cached} prompt tokens")
    if expected_generated is not None:
        short = sum(sample.num_generated < expected_generated for sample in ok if sample.usage)
        if short:
            found.append(f"{short} of {len(ok)} answers ended before their length (does the server obey ignore_eos?)")
    if run.load.request_rate is not None and ok:
        late = statistics.fmean(sample.late_s for sample in run.samples)
        # Time that a request waits in this client is not in its TTFT, so a wait of that order must be reported.
        ttfts = [sample.ttft_s for sample in ok if sample.ttft_s is not None]
        gap_s = 1 / run.load.request_rate
        if late > 0.1 * (min(gap_s, statistics.median(ttfts)) if ttfts else gap_s):
            found.append(
                f"requests were sent {late * 1e3:.1f} ms late on average, which is not in their TTFT: this client cannot "
                "hold the rate"
            )
    return found


def warnings_of(cell: Row) -> list[str]:
    """Everything to know before trusting the figures of a load."""
    found = [f"failed {count} times: {error}" for error, count in cell["errors"].items()]
    found += [f"stopped early: {cell['stopped']}"] if cell["stopped"] else []
    found += cell["doubts"]
    if 0 < (succeeded := cell["succeeded"]) < _FEW_REQUESTS:
        found.append(f"p99 of {succeeded} requests is hardly more than the slowest; measure {_FEW_REQUESTS}")
    return found


def latency_table(cells: Sequence[Row]) -> Table:
    rows = [
        {"name": cell["name"], "latency": latency, **(cell[key] or {"n": 0})}
        for cell in cells
        for key, latency in LATENCIES.items()
    ]
    load = [Column("load", "name")] if len(cells) > 1 else []
    statistics = [Column(name, name, ",.1f", 1e3) for name in ("mean", "std", "p50", "p90", "p95", "p99")]
    note = "Measured at the client, from when a request is sent. ITL are all gaps between an answer's events with text."
    return Table(
        title="Latencies in milliseconds" if load else cells[0]["name"],
        columns=[*load, Column("ms", "latency"), Column("n", "n", "d"), *statistics],
        rows=rows,
        note=note,
    )


def rate_table(cells: Sequence[Row]) -> Table:
    columns = [
        *(Column("load", "name"), Column("requests", "requested", "d"), Column("succeeded", "succeeded", "d")),
        *(Column("seconds", "duration_s", ".2f"), Column("requests/s", "requests_per_s", ".2f")),
        *(Column("output tok/s", "output_tokens_per_s", ".1f"), Column("tok/s", "total_tokens_per_s", ".1f")),
        Column("in flight", "mean_in_flight", ".1f"),
    ]
    return Table(title="Rates", columns=columns, rows=cells, wrong=lambda cell: bool(cell["failed"]))
