"""Reads result files of any bench: cells with raw samples by metric, and facts about the run."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightwire.bench.report.statistics import neighbour_batch
from tightwire.bench.report.table import Metric
from tightwire.comm.sizes import format_bytes

_PREFIX = "tightwire.bench."

Samples = dict[int, float]  # by index: in two results of the same prompts, the same request has the same index


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """``batch``: the number of consecutive samples that share the state of the machine or of the server's batch; they count as one."""

    name: str
    samples: Mapping[str, Samples]  # by metric; only metrics whose samples are all above 0 and so have ratios
    batch: int = 1
    requested: int = 0  # requests that were sent; 0 for a bench that sends none
    failed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    path: Path
    kind: str
    metrics: tuple[Metric, ...]
    cells: list[Cell]
    pairing: Any  # if equal in two results, samples of the same index are a pair; None: there are no pairs
    notes: tuple[str, ...]  # about samples that are left out
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def error(self) -> str | None:
        return self.raw.get("error")


def read_result(path: Path) -> Result:
    """A result that a bench wrote with ``--output``.

    Raises:
        ValueError: the file cannot be read, is no result of a bench, or has no samples.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, str) or not schema.startswith(_PREFIX):
        raise ValueError(
            f"{path} is no result of a bench: it has no schema {_PREFIX}...; give a JSON file that --output wrote"
        )
    kind = schema.removeprefix(_PREFIX).partition("/")[0]
    try:
        raw = _upgrade(kind, raw)
        found = raw["cells"]
        metrics = tuple(Metric(**metric) for metric in raw["metrics"])
        samples = [_by_index(cell["samples"]) for cell in found]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} has no samples to compare ({type(error).__name__}: {error}); give a JSON file that --output of today's "
            "bench wrote, not the last line of its stdout"
        ) from error
    if not found:
        raise ValueError(f"{path} has no cells: {raw.get('error') or 'nothing was measured'}")
    keys = raw.get("pairing_keys")
    return Result(
        path=path,
        kind=kind,
        metrics=metrics,
        cells=_make_cells(found, samples),
        pairing=[raw.get(key) for key in keys] if keys else None,
        notes=tuple(
            note for cell, own in zip(found, samples, strict=True) for note in _left_out(path, cell["name"], own)
        ),
        raw=raw,
    )


def _by_index(samples: Mapping[str, Sequence[float | None]]) -> dict[str, Samples]:
    found = {
        name: {i: value for i, value in enumerate(values) if value is not None} for name, values in samples.items()
    }
    return {name: values for name, values in found.items() if values}


def _left_out(path: Path, name: str, samples: Mapping[str, Samples]) -> list[str]:
    """For example the TPOT of answers whose tokens all came in one piece: 0 seconds."""
    return [
        f"{path}: {name} has {metric} of {min(values.values()):g}, to which there is no ratio; {metric} is left out there"
        for metric, values in samples.items()
        if min(values.values()) <= 0
    ]


def _make_cells(found: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Samples]]) -> list[Cell]:
    """Cells of the same name, such as ``--concurrency 4,4`` gives, are numbered."""
    times: Counter[str] = Counter()
    cells = []
    for cell, own in zip(found, samples, strict=True):
        times[cell["name"]] += 1
        number = f" ({times[cell['name']]})" if times[cell["name"]] > 1 else ""
        cells.append(
            Cell(
                name=f"{cell['name']}{number}",
                samples={name: values for name, values in own.items() if min(values.values()) > 0},
                batch=cell.get("batch", 1),
                requested=cell.get("requested", 0),
                failed=cell.get("failed", 0),
            )
        )
    return cells


def _upgrade(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` as a bench writes it today. Version 1 differs for each bench; those of comm, kernels and quality are converted."""
    if "metrics" in raw or kind not in ("comm", "kernels", "quality"):
        return dict(raw)
    if kind == "quality":
        metrics = [{"name": name, "unit": "nats", "better": "better", "worse": "worse"} for name in ("kl", "nll")]
        cells = [
            {
                "name": f"{row['algorithm']}, {row['world_size']} ranks",
                "samples": {
                    "nll": row["nll"],
                    **({"kl": row["kl"]} if any(row["kl"]) else {}),
                },  # exact ones have no KL
            }
            for row in raw["window_means"]
        ]
        return {**raw, "metrics": metrics, "pairing_keys": ["text", "model", "window"], "cells": cells}
    if kind == "comm":
        calls = [(f"{cell['algorithm']}, {format_bytes(cell['size'])}", cell["samples_s"]) for cell in raw["cells"]]
    else:
        calls = [(row["name"], row["samples_s"]) for row in [*raw["codecs"], *raw["all_reduces"]]]
    cells = [{"name": name, "samples": {"seconds": s}, "batch": neighbour_batch(len(s))} for name, s in calls]
    return {**raw, "metrics": [{"name": "seconds", "unit": "us", "scale": 1e6}], "pairing_keys": None, "cells": cells}
