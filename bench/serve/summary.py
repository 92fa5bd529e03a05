"""Samples of one arm boiled down: n, mean, std and percentiles of each latency, and the rates over the whole arm."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tightwire.bench.client import Sample
from tightwire.bench.report.statistics import describe
from tightwire.bench.serve.load import Arm
from tightwire.bench.serve.slo import Slo


def latencies(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds of each kind over the requests that succeeded."""
    ok = [sample for sample in samples if sample.error is None]
    return {
        "ttft_s": [s.ttft_s for s in ok if s.ttft_s is not None],
        "tpot_s": [s.tpot_s for s in ok if s.tpot_s is not None],
        "itl_s": [gap for s in ok for gap in s.itl_s],
        "e2e_s": [s.e2e_s for s in ok if s.e2e_s is not None],
    }


def summarize(arm: Arm, slo: Slo | None = None) -> dict[str, Any]:
    """One arm as plain data: counts, rates, a distribution per latency, and the goodput where there are limits."""
    ok = [sample for sample in arm.samples if sample.error is None]
    num_prompt = sum(sample.num_prompt for sample in ok)
    num_generated = sum(sample.num_generated for sample in ok)
    counted = all(sample.usage for sample in ok)
    seconds = arm.duration_s or math.inf
    described = {name: describe(values) for name, values in latencies(arm.samples).items()}
    return {
        "load": arm.load.name,
        "concurrency": arm.load.concurrency,
        "request_rate": arm.load.request_rate,
        "burstiness": arm.load.burstiness,
        "requested": arm.num_requests,
        "succeeded": len(ok),
        "failed": len(arm.samples) - len(ok),
        "stopped": arm.stopped,
        "duration_s": arm.duration_s,
        "prompt_tokens": num_prompt if counted else None,
        "cached_tokens": sum(sample.num_cached for sample in ok) if counted else None,
        "generated_tokens": num_generated,
        "requests_per_s": len(ok) / seconds,
        "output_tokens_per_s": num_generated / seconds,
        "total_tokens_per_s": (num_prompt + num_generated) / seconds if counted else None,
        "mean_in_flight": sum(sample.e2e_s or 0.0 for sample in ok) / seconds,
        **{name: asdict(d) if d else None for name, d in described.items()},
        "goodput": None if slo is None else slo.goodput(arm.samples, arm.duration_s),
        "errors": dict(Counter(sample.error for sample in arm.samples if sample.error).most_common()),
    }


def doubts(arm: Arm, expected_generated: Sequence[int] | None = None) -> list[str]:
    """Reasons to read the arm's figures with care; empty when there are none.

    Args:
        expected_generated: tokens each request was to generate, by its index, when all were to run to that length.
    """
    ok = [sample for sample in arm.samples if sample.error is None]
    found: list[str] = []
    if any(not sample.usage for sample in ok):
        found.append("the server sends no usage: tokens are counted as events with text, prompt tokens are unknown")
    if mute := sum(sample.ttft_s is None for sample in ok):
        found.append(f"{mute} of {len(ok)} answers have no text and so no TTFT")
    if cached := sum(sample.num_cached for sample in ok):
        found.append(f"a prefix cache supplied {cached} prompt tokens")
    if expected_generated is not None:
        short = sum(sample.num_generated < expected_generated[sample.index] for sample in ok if sample.usage)
        if short:
            found.append(f"{short} of {len(ok)} answers ended before their length (is ignore_eos obeyed?)")
    if arm.load.request_rate is not None and ok:
        late = statistics.fmean(sample.late_s for sample in arm.samples)
        # What a request waited in this client is not in its TTFT, so a wait that would show there must be told.
        ttfts = [sample.ttft_s for sample in ok if sample.ttft_s is not None]
        gap_s = 1 / arm.load.request_rate
        if late > 0.1 * (min(gap_s, statistics.median(ttfts)) if ttfts else gap_s):
            found.append(
                f"requests left {late * 1e3:.1f} ms late on average, which is not in their TTFT: this client cannot hold the "
                "rate"
            )
    return found
