"""Results of the benches as ``compare`` sees them: cells with raw samples by metric, and what says whether they are alike."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tightwire.bench.compare import cells
from tightwire.bench.compare.cells import Cell

_PREFIX = "tightwire.bench."


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """``scale`` turns a sample into ``unit``; ``decides``: a regression of it fails the comparison unless others are named."""

    name: str
    unit: str = ""
    scale: float = 1.0
    worse_is_higher: bool = True
    decides: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How one bench's results are read. ``better`` and ``worse``: what its users call it."""

    read: Callable[[Mapping[str, Any]], list[Cell]]
    metrics: tuple[Metric, ...]
    same: Callable[[Mapping[str, Any]], Any] = lambda result: None  # equal in both: samples of one id belong together
    better: str = "faster"
    worse: str = "slower"


def _ms(name: str, *, decides: bool = True) -> Metric:
    return Metric(name=name, unit="ms", scale=1e3, decides=decides)


KINDS: dict[str, Kind] = {
    "serve": Kind(
        read=cells.of_serve,
        metrics=(_ms("ttft_s"), _ms("tpot_s"), _ms("e2e_s"), _ms("itl_s", decides=False)),
        same=lambda result: (result["workload"], result["request"]),
    ),
    "ttft": Kind(
        read=cells.of_ttft,
        metrics=(
            Metric(name="ttft_ratio"),
            Metric(name="tpot_ratio", decides=False),
            _ms("ttft_s", decides=False),
            _ms("tpot_s", decides=False),
        ),
    ),
    "comm": Kind(read=cells.of_comm, metrics=(Metric(name="seconds", unit="us", scale=1e6),)),
    "kernels": Kind(read=cells.of_kernels, metrics=(Metric(name="seconds", unit="us", scale=1e6),)),
    "quality": Kind(
        read=cells.of_quality,
        metrics=(Metric(name="kl", unit="nats"), Metric(name="nll", unit="nats")),
        same=lambda result: (result.get("text"), result.get("model"), result.get("window")),
        better="better",
        worse="worse",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    path: Path
    kind: str
    version: str
    cells: list[Cell]
    same: Any
    notes: tuple[str, ...]  # what was left out, in words
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def error(self) -> str | None:
        return self.raw.get("error")


def read_result(path: Path) -> Result:
    """A result that a bench kept with ``--output``.

    Raises:
        ValueError: the file cannot be read, is no result, is of a kind that has nothing to compare, or has no samples.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, str) or not schema.startswith(_PREFIX):
        raise ValueError(
            f"{path} is no result of a bench: it has no schema {_PREFIX}...; give a JSON file that --output kept"
        )
    kind, _, version = schema.removeprefix(_PREFIX).partition("/")
    if kind not in KINDS:
        raise ValueError(f"{path} is a result of bench {kind}; what can be compared are {', '.join(KINDS)}")
    try:
        found, same = KINDS[kind].read(raw), KINDS[kind].same(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not as bench {kind} keeps it ({type(error).__name__}: {error}); the last line that a bench prints has "
            "no raw samples, so give the JSON file that --output kept"
        ) from error
    if not found:
        raise ValueError(f"{path} has no cells: {raw.get('error') or 'nothing was measured'}")
    notes = tuple(f"{path}: {words}" for cell in found for words in _without_ratio(cell))
    return Result(path=path, kind=kind, version=version, cells=_comparable(found), same=same, notes=notes, raw=raw)


def _without_ratio(cell: Cell) -> list[str]:
    """Such as the TPOT of answers whose tokens all came in one piece: 0 seconds."""
    return [
        f"{cell.name} has {name} of {min(samples.values()):g}, to which there is no ratio; {name} is left out there"
        for name, samples in cell.metrics.items()
        if samples and min(samples.values()) <= 0
    ]


def _comparable(found: Sequence[Cell]) -> list[Cell]:
    """Only metrics that have ratios; cells of the same name, such as ``--concurrency 4,4`` gives, are numbered."""
    times: Counter[str] = Counter()
    cells = []
    for cell in found:
        times[cell.name] += 1
        number = f" ({times[cell.name]})" if times[cell.name] > 1 else ""
        metrics = {name: samples for name, samples in cell.metrics.items() if samples and min(samples.values()) > 0}
        cells.append(replace(cell, name=f"{cell.name}{number}", metrics=metrics))
    return cells
