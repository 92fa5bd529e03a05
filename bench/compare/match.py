"""Matches the cells of two results by name: the ratio of each metric with its interval and verdict."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from tightwire.bench.compare.results import Cell, Result, Samples
from tightwire.bench.report.statistics import compare
from tightwire.bench.report.table import Metric

# Where these facts differ, a ratio compares machines or settings and not the program.
_FACTS = (
    *("environment.cpu", "environment.usable_cores", "environment.os", "environment.python", "environment.packages"),
    *("environment.tightwire", "environment.git_revision", "server.model", "server.refused", "workload", "request"),
    *("model", "dtype", "device", "device_name", "tp", "ranks", "nodes", "transport", "links", "link.name", "link.how"),
    *("link.emulation", "comm.link.name", "comm.link.emulation", "options", "text", "window", "num_layers"),
    *("hidden_size", "weights"),
)
_FREE = ("seed", "num_words", "tokens_per_word")  # differ from run to run by design


def check_alike(a: Result, b: Result) -> None:
    """
    Raises:
        ValueError: unlike schemas, cells none of which are in both, or baselines that differ.
    """
    if a.kind != b.kind:
        raise ValueError(
            f"{a.path} is a result of bench {a.kind} and {b.path} of bench {b.kind}; give two of one bench"
        )
    if not {cell.name for cell in a.cells} & {cell.name for cell in b.cells}:
        raise ValueError(
            f"the results have no cell in common: {a.path} has {_names(a.cells)}, and {b.path} has {_names(b.cells)}"
        )
    if (mine := _at(a.raw, "options.baseline")) != (other := _at(b.raw, "options.baseline")):
        raise ValueError(f"ratios are to the baseline, which is {mine} in {a.path} and {other} in {b.path}")


def compare_cells(a: Result, b: Result, metrics: Sequence[Metric], tolerance: float) -> list[dict[str, Any]]:
    """Every metric of every cell that is in both results, in the order of ``a``: medians, ratio, interval, verdict."""
    others = {cell.name: cell for cell in b.cells}
    pairs = a.pairing is not None and a.pairing == b.pairing
    found = []
    for cell in a.cells:
        if cell.name not in others:
            continue
        other = others[cell.name]
        batch = max(cell.batch, other.batch)
        for metric in metrics:
            mine, its = cell.samples.get(metric.name), other.samples.get(metric.name)
            if mine and its:
                compared = _compare(metric, _batched(mine, batch), _batched(its, batch), tolerance, pairs=pairs)
                found.append({"cell": cell.name, "metric": metric.name, "unit": metric.unit, **compared})
    return found


def _batched(samples: Samples, batch: int) -> Samples:
    """The median of each batch, by its number."""
    batches: dict[int, list[float]] = defaultdict(list)
    for number, value in samples.items():
        batches[number // batch].append(value)
    return {number: median(values) for number, values in batches.items()}


def _compare(metric: Metric, mine: Samples, its: Samples, tolerance: float, *, pairs: bool) -> dict[str, Any]:
    shared = sorted(mine.keys() & its.keys())
    paired = pairs and bool(shared)
    before = [mine[i] for i in shared] if paired else list(mine.values())
    after = [its[i] for i in shared] if paired else list(its.values())
    found = compare(before, after, paired=paired, worse_is_higher=metric.worse_is_higher)
    beyond = found.low > 1 + tolerance if metric.worse_is_higher else found.high < 1 - tolerance
    return {
        "a": median(before) * metric.scale,
        "b": median(after) * metric.scale,
        "paired": paired,
        **asdict(found),
        "verdict": {"faster": metric.better, "slower": metric.worse}.get(found.verdict, found.verdict),
        "regression": metric.decides and found.verdict == "slower" and beyond,
    }


def faults(a: Result, b: Result, tolerance: float) -> list[str]:
    """Failures of B that A does not have: times of successful requests do not show them."""
    found = [f"B is not complete, but A is: {b.error}"] if b.error and not a.error else []
    others = {cell.name: cell for cell in b.cells}
    for cell in a.cells:
        other = others.get(cell.name)
        if other is None or not (cell.requested and other.requested):
            continue
        if other.failed / other.requested > cell.failed / cell.requested + tolerance:
            found.append(
                f"{cell.name}: {other.failed} of {other.requested} requests failed in B, but {cell.failed} of "
                f"{cell.requested} in A"
            )
    return found


def chosen_metrics(result: Result, names: Sequence[str]) -> list[Metric]:
    """The metrics in ``names``, which then decide; without names all metrics of the bench.

    Raises:
        ValueError: the bench has no such metric.
    """
    known = {metric.name: metric for metric in result.metrics}
    for name in names:
        if name not in known:
            raise ValueError(f"bench {result.kind} has no metric {name!r} to compare; it has {', '.join(known)}")
    return [replace(known[name], decides=True) for name in names] or list(known.values())


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
    mine, other = {cell.name for cell in a.cells}, {cell.name for cell in b.cells}
    for path, only in ((a.path, mine - other), (b.path, other - mine)):
        if only:
            found.append(f"only {path} has {', '.join(sorted(only))}")
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


def _names(cells: Sequence[Cell]) -> str:
    names = [cell.name for cell in cells]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
