"""The cells of each bench's result: a name, and raw samples by metric.

A metric's samples have ids: in two results of the same prompts, the same request (or window of text) has the same id.
Times are seconds. What failed is no sample.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tightwire.comm.sizes import format_bytes

Samples = dict[int, float]  # by id

_BATCHES = 20  # that one run is divided into


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """``batch``: so many neighbours by id share their luck, and are one sample together."""

    name: str
    metrics: Mapping[str, Samples]
    batch: int = 1
    requested: int = 0  # requests that were sent; 0 where a bench sends none
    failed: int = 0


def of_serve(result: Mapping[str, Any]) -> list[Cell]:
    """A cell for each load; a batch is at least as many requests as were in flight, for those share the server's steps.

    ITL is a request's mean gap: single gaps are not independent.
    """
    cells = []
    for arm in result["arms"]:
        ok = {sample["index"]: sample for sample in arm["samples"] if not sample["error"]}
        metrics = {
            name: {index: sample[name] for index, sample in ok.items() if sample[name] is not None}
            for name in ("ttft_s", "tpot_s", "e2e_s")
        }
        metrics["itl_s"] = {index: fmean(sample["itl_s"]) for index, sample in ok.items() if sample["itl_s"]}
        cells.append(
            Cell(
                name=arm["load"],
                metrics=metrics,
                batch=max(arm.get("concurrency") or round(arm.get("mean_in_flight") or 1), _batch(len(arm["samples"]))),
                requested=len(arm["samples"]),
                failed=len(arm["samples"]) - len(ok),
            )
        )
    return cells


def of_ttft(result: Mapping[str, Any]) -> list[Cell]:
    """A cell for each arm at each prompt length and concurrency; one sample for each block, the mean of its requests.

    ``ttft_ratio`` and ``tpot_ratio`` are the arm's value over the baseline's of the same block. Both were measured within
    moments, so what the machine did meanwhile cancels: they can be compared between days and machines, and decide.
    """
    baseline = result["options"]["baseline"]
    blocks: dict[tuple[int, int], dict[str, dict[int, list[Mapping[str, Any]]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for sample in result["samples"]:
        blocks[sample["prompt_len"], sample["concurrency"]][sample["arm"]][sample["round"]].append(sample)
    cells = []
    for (prompt_len, concurrency), arms in blocks.items():
        base = {name: _block_means(arms[baseline], name) for name in ("ttft_s", "tpot_s")}
        for arm, rounds in arms.items():
            metrics = {name: _block_means(rounds, name) for name in ("ttft_s", "tpot_s")}
            if arm != baseline:
                metrics["ttft_ratio"] = _ratios(metrics["ttft_s"], base["ttft_s"])
                metrics["tpot_ratio"] = _ratios(metrics["tpot_s"], base["tpot_s"])
            cells.append(Cell(name=f"{arm}, {prompt_len} tokens, {concurrency} at a time", metrics=metrics))
    return cells


def of_comm(result: Mapping[str, Any]) -> list[Cell]:
    """A cell for each algorithm and size."""
    if "metrics" in result:
        return [_of_calls(cell["name"], cell["samples"]["seconds"]) for cell in result["cells"]]
    return [
        _of_calls(f"{cell['algorithm']}, {format_bytes(cell['size'])}", cell["samples_s"]) for cell in result["cells"]
    ]


def of_kernels(result: Mapping[str, Any]) -> list[Cell]:
    """A cell for each operation, codec and size."""
    return [_of_calls(row["name"], row["samples_s"]) for row in [*result["codecs"], *result["all_reduces"]]]


def of_quality(result: Mapping[str, Any]) -> list[Cell]:
    """A cell for each algorithm and world size; one sample for each window of the text. Exact arms have no KL."""
    cells = []
    for row in result["window_means"]:
        metrics = {name: dict(enumerate(row[name])) for name in ("kl", "nll")}
        if not any(row["kl"]):
            del metrics["kl"]
        cells.append(Cell(name=f"{row['algorithm']}, {row['world_size']} ranks", metrics=metrics))
    return cells


def _of_calls(name: str, seconds: Sequence[float]) -> Cell:
    return Cell(name=name, metrics={"seconds": dict(enumerate(seconds))}, batch=_batch(len(seconds)))


def _batch(count: int) -> int:
    """What follows each other meets the same moods of the machine, so a run has some ``_BATCHES`` samples at most."""
    return max(1, count // _BATCHES)


def _block_means(rounds: Mapping[int, list[Mapping[str, Any]]], name: str) -> Samples:
    return {number: fmean(sample[name] for sample in samples) for number, samples in rounds.items()}


def _ratios(values: Samples, base: Samples) -> Samples:
    return {number: value / base[number] for number, value in values.items() if base.get(number)}
