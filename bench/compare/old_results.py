"""Converts result files of version 1, in which each bench had a layout of its own, to the layout of today."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from tightwire.bench.report.statistics import neighbour_batch
from tightwire.bench.report.table import Metric
from tightwire.comm.sizes import format_bytes


def upgrade(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with ``metrics`` and ``cells`` as a bench writes them today; a result of version 2 as it is.

    Raises:
        KeyError, TypeError, AttributeError: ``raw`` is not a result of this kind with raw samples.
    """
    if "metrics" in raw or kind not in _KINDS:
        return dict(raw)
    read, metrics, pairing_keys = _KINDS[kind]
    plain = [asdict(metric) for metric in metrics]
    return {**raw, "metrics": plain, "pairing_keys": pairing_keys, "cells": read(raw)}


def _serve_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A cell for each load."""
    cells = []
    for arm in result["arms"]:
        samples = arm["samples"]
        by_index: list[Mapping[str, Any]] = [{}] * (1 + max((sample["index"] for sample in samples), default=-1))
        for sample in samples:
            if not sample["error"]:
                by_index[sample["index"]] = sample
        metrics: dict[str, list[Any]] = {
            name: [sample.get(name) for sample in by_index] for name in ("ttft_s", "tpot_s", "e2e_s")
        }
        metrics["itl_s"] = [fmean(gaps) if (gaps := sample.get("itl_s")) else None for sample in by_index]
        in_flight = arm.get("concurrency") or round(arm.get("mean_in_flight") or 1)
        cells.append(
            {
                "name": arm["load"],
                "samples": metrics,
                "batch": max(in_flight, neighbour_batch(len(samples))),
                "requested": len(samples),
                "failed": sum(bool(sample["error"]) for sample in samples),
            }
        )
    return cells


def _ttft_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A cell for each arm at each prompt length and concurrency; a sample is the mean of a round's requests."""
    times: dict[tuple[int, int], dict[str, dict[int, list[Any]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for sample in result["samples"]:
        times[sample["prompt_len"], sample["concurrency"]][sample["arm"]][sample["round"]].append(sample)
    cells = []
    for (prompt_len, concurrency), arms in times.items():
        base = arms[result["options"]["baseline"]]
        for arm, rounds in arms.items():
            metrics: dict[str, list[Any]] = defaultdict(list)
            for number in range(1 + max(rounds)):
                for name in ("ttft", "tpot"):
                    mean, of_base = (_mean(each.get(number), f"{name}_s") for each in (rounds, base))
                    metrics[f"{name}_s"].append(mean)
                    metrics[f"{name}_ratio"].append(mean / of_base if mean and of_base and rounds is not base else None)
            cells.append({"name": f"{arm}, {prompt_len} tokens, {concurrency} at a time", "samples": dict(metrics)})
    return cells


def _mean(samples: Sequence[Mapping[str, Any]] | None, name: str) -> float | None:
    return fmean(sample[name] for sample in samples) if samples else None


def _comm_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_calls(f"{cell['algorithm']}, {format_bytes(cell['size'])}", cell["samples_s"]) for cell in result["cells"]]


def _kernels_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_calls(row["name"], row["samples_s"]) for row in [*result["codecs"], *result["all_reduces"]]]


def _calls(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    return {"name": name, "samples": {"seconds": seconds}, "batch": neighbour_batch(len(seconds))}


def _quality_cells(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A cell for each algorithm and world size; a sample is a window of the text. Exact arms have no KL."""
    return [
        {
            "name": f"{row['algorithm']}, {row['world_size']} ranks",
            "samples": {"nll": row["nll"], **({"kl": row["kl"]} if any(row["kl"]) else {})},
        }
        for row in result["window_means"]
    ]


def _ms(name: str, *, decides: bool = True) -> Metric:
    return Metric(name=name, unit="ms", scale=1e3, decides=decides)


_SECONDS = (Metric(name="seconds", unit="us", scale=1e6),)
_TTFT = (
    Metric(name="ttft_ratio"),
    Metric(name="tpot_ratio", decides=False),
    *(_ms(name, decides=False) for name in ("ttft_s", "tpot_s")),
)
_QUALITY = tuple(Metric(name=name, unit="nats", better="better", worse="worse") for name in ("kl", "nll"))
_KINDS = {
    "serve": (
        _serve_cells,
        (*map(_ms, ("ttft_s", "tpot_s", "e2e_s")), _ms("itl_s", decides=False)),
        ["workload", "request"],
    ),
    "ttft": (_ttft_cells, _TTFT, None),
    "comm": (_comm_cells, _SECONDS, None),
    "kernels": (_kernels_cells, _SECONDS, None),
    "quality": (_quality_cells, _QUALITY, ["text", "model", "window"]),
}
