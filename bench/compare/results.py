"""Reads the result files of two runs of one bench, and says where they differ apart from their samples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from tightwire.bench.report.table import Metric

_PREFIX = "tightwire.bench."
# Where these facts differ, a ratio compares machines or settings and not the program.
_FACTS = (
    *("environment.cpu", "environment.usable_cores", "environment.os", "environment.python", "environment.packages"),
    *("environment.tightwire", "environment.git_revision", "server.model", "workload", "request"),
    *("model", "dtype", "device", "device_name", "tp", "ranks", "nodes", "transport", "links", "link.name", "link.how"),
    *("link.emulation", "comm.link.name", "comm.link.emulation", "options", "text", "window", "num_layers"),
    *("hidden_size", "weights"),
)
_FREE = ("seed", "num_words", "tokens_per_word")  # differ from run to run by design

T = TypeVar("T")
_Stored = list[float | None]
Samples = Mapping[int, float]  # by index: in two results of the same prompts, the same request has the same index


class Cell(msgspec.Struct, Generic[T], frozen=True):
    """A cell with a list for each metric as in the file, or with the ``Samples`` of metrics whose samples are all above 0."""

    name: str
    samples: Mapping[str, T]
    # Consecutive samples that share the state of the machine or the server's batch: they count as one.
    batch: Annotated[int, msgspec.Meta(ge=1)] = 1
    requested: Annotated[int, msgspec.Meta(ge=0)] = 0  # requests that were sent; 0 for a bench that sends none
    failed: Annotated[int, msgspec.Meta(ge=0)] = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    path: Path
    kind: str
    metrics: tuple[Metric, ...]
    cells: Mapping[str, Cell[Samples]]
    pairing: list[Any] | None  # where it is equal in two results, samples of the same index are pairs; None: no pairs
    notes: tuple[str, ...]  # about samples that are left out
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def error(self) -> str | None:
        return self.raw.get("error")

    def chosen_metrics(self, names: Sequence[str]) -> list[Metric]:
        """The metrics in ``names``, which then decide; without names all. Raises ValueError for one that the bench lacks."""
        known = {metric.name: metric for metric in self.metrics}
        for name in names:
            if name not in known:
                raise ValueError(f"bench {self.kind} has no metric {name!r} to compare; it has {', '.join(known)}")
        return [replace(known[name], decides=True) for name in names] or list(known.values())


def read_result(path: Path) -> Result:
    """A result that a bench wrote with ``--output``; raises ValueError for anything else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, str) or not schema.startswith(_PREFIX):
        raise ValueError(f"{path} is no result of a bench: it has no schema {_PREFIX}...; give a file of --output")
    notes: list[str] = []
    cells: dict[str, Cell[Samples]] = {}
    try:
        metrics = msgspec.convert(raw["metrics"], tuple[Metric, ...])
        keys = msgspec.convert(raw.get("pairing_keys") or [], list[str])
        stored = msgspec.convert(raw["cells"], list[Cell[_Stored]])
        for number, cell in enumerate(stored):
            times = sum(each.name == cell.name for each in stored[:number])
            # Cells of the same name, such as --concurrency 4,4 gives, are numbered.
            cells[f"{cell.name} ({times + 1})" if times else cell.name] = _make_cell(path, cell, notes)
    except (KeyError, msgspec.ValidationError) as error:
        raise ValueError(
            f"{path} has no samples to compare ({type(error).__name__}: {error}); give a JSON file that --output of today's "
            "bench wrote, not the last line of its stdout"
        ) from error
    if not cells:
        raise ValueError(f"{path} has no cells: {raw.get('error') or 'nothing was measured'}")
    kind = schema.removeprefix(_PREFIX).partition("/")[0]
    pairing = [raw.get(key) for key in keys] or None
    return Result(path=path, kind=kind, metrics=metrics, cells=cells, pairing=pairing, notes=tuple(notes), raw=raw)


def _make_cell(path: Path, cell: Cell[_Stored], notes: list[str]) -> Cell[Samples]:
    samples: dict[str, Samples] = {}
    for metric, values in cell.samples.items():
        known = {i: value for i, value in enumerate(values) if value is not None}
        if known and min(known.values()) > 0:
            samples[metric] = known
        elif known:  # for example the TPOT of answers whose tokens all came in one piece: 0 seconds
            least = f"{metric} of {min(known.values()):g}, to which there is no ratio"
            notes.append(f"{path}: {cell.name} has {least}; {metric} is left out there")
    return Cell(cell.name, samples, cell.batch, cell.requested, cell.failed)


def check_alike(a: Result, b: Result) -> None:
    """Raises ValueError for results of two benches, without a common cell, or with baselines that differ."""
    if a.kind != b.kind:
        raise ValueError(f"{a.path} is a result of bench {a.kind} and {b.path} of bench {b.kind}; give two of one")
    if not a.cells.keys() & b.cells.keys():
        raise ValueError(
            f"the results have no cell in common: {a.path} has {_names(a.cells)}, and {b.path} has {_names(b.cells)}"
        )
    if (mine := _at(a.raw, "options.baseline")) != (other := _at(b.raw, "options.baseline")):
        raise ValueError(f"ratios are to the baseline, which is {mine} in {a.path} and {other} in {b.path}")


def differences(a: Result, b: Result) -> list[str]:
    """The differences between the two results apart from their samples, in words."""
    facts, others = _facts(a.raw), _facts(b.raw)
    found = [
        f"{name} differs: {facts.get(name)} in A, {others.get(name)} in B"
        for name in {**facts, **others}
        if facts.get(name) != others.get(name)
    ]
    found += [f"{result.path} is not complete: {result.error}" for result in (a, b) if result.error]
    found += [*a.notes, *b.notes]
    for one, other in ((a, b), (b, a)):
        if only := sorted(one.cells.keys() - other.cells.keys()):
            found.append(f"only {one.path} has {', '.join(only)}")
    return found


def _facts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``_FACTS`` by name, the entries of mappings one by one."""
    facts: dict[str, Any] = {}
    for path in _FACTS:
        value = _at(raw, path)
        if isinstance(value, Mapping):
            facts |= {f"{path}.{name}": inner for name, inner in value.items() if name not in _FREE}
        elif value is not None:
            facts[path] = value
    return facts


def _at(raw: Mapping[str, Any], path: str) -> Any:
    value: Any = raw
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join([*names][:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
