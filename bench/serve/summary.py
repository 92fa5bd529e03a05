"""Summarizes the samples of one load: distributions of latencies, rates, goodput by limits, reasons for doubt."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tightwire.bench.client import Sample
from tightwire.bench.report.statistics import describe, neighbour_batch
from tightwire.bench.serve.load import LoadRun

_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Seconds that a request may take; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        limits = {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "e2e_s": self.e2e_s}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def meets(self, sample: Sample) -> bool:
        """True if the request succeeded within all limits. No text exceeds any TTFT limit; one token has no TPOT."""
        if sample.error:
            return False
        taken = {"ttft_s": sample.ttft_s, "tpot_s": sample.tpot_s or 0.0, "e2e_s": sample.e2e_s}
        return all(
            value is not None and value <= limit for name, limit in self.limits.items() for value in [taken[name]]
        )

    def goodput(self, samples: Sequence[Sample], seconds: float) -> dict[str, float | dict[str, float]]:
        """The number of sent requests that met all limits, their share, and their number per second."""
        met = sum(map(self.meets, samples))
        share = met / len(samples) if samples else 0.0
        return {"slo": self.limits, "met": met, "share": share, "requests_per_s": met / (seconds or math.inf)}


def parse_slo(text: str) -> Slo:
    """The limits in ``ttft=500ms,tpot=50ms,e2e=10s``, any of the three.

    Raises:
        ValueError: another name, a name twice, or no duration.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, duration = (word.strip() for word in part.partition("="))
        found = _DURATION.fullmatch(duration)
        if name not in ("ttft", "tpot", "e2e") or name in limits or found is None or not float(found[1]):
            raise ValueError(
                f"--slo takes limits for ttft, tpot, e2e, such as ttft=500ms,tpot=50ms,e2e=10s, got {text!r}"
            )
        limits[name] = float(found[1]) / _PER_SECOND[found[2]]
    return Slo(**{f"{name}_s": limit for name, limit in limits.items()})


def latencies(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds of each kind over the requests that succeeded."""
    ok = [sample for sample in samples if sample.error is None]
    return {
        "ttft_s": [s.ttft_s for s in ok if s.ttft_s is not None],
        "tpot_s": [s.tpot_s for s in ok if s.tpot_s is not None],
        "itl_s": [gap for s in ok for gap in s.itl_s],
        "e2e_s": [s.e2e_s for s in ok if s.e2e_s is not None],
    }


def summarize(run: LoadRun, slo: Slo | None = None) -> dict[str, Any]:
    """The cell of one load: counts, rates, a distribution of each latency, goodput where there are limits, samples."""
    ok = [sample for sample in run.samples if sample.error is None]
    num_prompt = sum(sample.num_prompt for sample in ok)
    num_generated = sum(sample.num_generated for sample in ok)
    counted = all(sample.usage for sample in ok)
    seconds = run.duration_s or math.inf
    in_flight = sum(sample.e2e_s or 0.0 for sample in ok) / seconds
    described = {name: describe(values) for name, values in latencies(run.samples).items()}
    return {
        "name": run.load.name,
        "concurrency": run.load.concurrency,
        "request_rate": run.load.request_rate,
        "burstiness": run.load.burstiness,
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
        **{name: asdict(d) if d else None for name, d in described.items()},
        "goodput": None if slo is None else slo.goodput(run.samples, run.duration_s),
        "errors": dict(Counter(sample.error for sample in run.samples if sample.error).most_common()),
        # Requests that are in flight together share the server's steps, so their times are not independent.
        "batch": max(run.load.concurrency or round(in_flight) or 1, neighbour_batch(len(run.samples))),
        "samples": _samples_by_index(run.samples),
        "raw": [{**asdict(sample), "tpot_s": sample.tpot_s} for sample in run.samples],
    }


def _samples_by_index(samples: Sequence[Sample]) -> dict[str, list[float | None]]:
    """By the requests' indices, so that runs with the same prompts are compared in pairs; None for a failed request."""
    found: dict[str, list[float | None]] = {
        name: [None] * (1 + max((sample.index for sample in samples), default=-1))
        for name in ("ttft_s", "tpot_s", "e2e_s", "itl_s")
    }
    for sample in samples:
        if sample.error is None:
            # ITL: a request's mean gap, because single gaps are not independent.
            mean_gap_s = statistics.fmean(sample.itl_s) if sample.itl_s else None
            values = {"ttft_s": sample.ttft_s, "tpot_s": sample.tpot_s, "e2e_s": sample.e2e_s, "itl_s": mean_gap_s}
            for name, value in values.items():
                found[name][sample.index] = value
    return found


def doubts(run: LoadRun, expected_generated: Sequence[int] | None = None) -> list[str]:
    """Reasons not to trust the figures of the load; empty when there are none.

    Args:
        expected_generated: tokens each request was to generate, by its index, when all were to run to that length.
    """
    ok = [sample for sample in run.samples if sample.error is None]
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
    if run.load.request_rate is not None and ok:
        late = statistics.fmean(sample.late_s for sample in run.samples)
        # Time that a request waits in this client is not in its TTFT, so a wait of that order must be reported.
        ttfts = [sample.ttft_s for sample in ok if sample.ttft_s is not None]
        gap_s = 1 / run.load.request_rate
        if late > 0.1 * (min(gap_s, statistics.median(ttfts)) if ttfts else gap_s):
            found.append(
                f"requests left {late * 1e3:.1f} ms late on average, which is not in their TTFT: this client cannot hold the "
                "rate"
            )
    return found
