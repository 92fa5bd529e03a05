"""Turns rounds into cells and a table: medians for each server and load, and ratios to the first server."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tightwire.bench.report.statistics import compare
from tightwire.bench.report.table import Column, Metric, Table

METRICS = (
    Metric(name="ttft_s", unit="ms", scale=1e3),
    Metric(name="tpot_s", unit="ms", scale=1e3),
    Metric(name="output_tokens_per_s", unit="tokens/s", worse_is_higher=False),
)
_TITLES = {"ttft_s": "TTFT ms", "tpot_s": "TPOT ms", "output_tokens_per_s": "tokens/s"}


def _ratio_text(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['ratio']:.2f}, {ratio['low']:.2f} to {ratio['high']:.2f}: {ratio['verdict']}"


_COLUMNS = (
    *(Column("server", "server"), Column("in flight", "concurrency", "d")),
    *(
        column
        for metric in METRICS
        for column in (
            Column(_TITLES[metric.name], f"medians.{metric.name}", ".1f", metric.scale),
            Column("ratio [95 %]", f"comparisons.{metric.name}", _ratio_text),
        )
    ),
)
CSV_COLUMNS = (
    *(column for column in _COLUMNS if column.format is not _ratio_text),
    *(Column(f"{metric.name} ratio", f"comparisons.{metric.name}.ratio", ".3f") for metric in METRICS),
)


def summarize(peers: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """One cell for each server and concurrency, with each round's median and the ratios to the first server by metric."""
    cells: list[dict[str, Any]] = []
    for peer in peers:
        for concurrency in dict.fromkeys(load["concurrency"] for turn in peer["turns"] for load in turn["loads"]):
            rounds = {metric.name: _by_round(peer, concurrency, metric) for metric in METRICS}
            comparisons = {}
            for metric in METRICS if peer is not peers[0] else ():
                base, own = _by_round(peers[0], concurrency, metric), rounds[metric.name]
                if common := sorted(base.keys() & own.keys()):
                    pairs = [base[number] for number in common], [own[number] for number in common]
                    found = compare(*pairs, paired=True, seed=seed, worse_is_higher=metric.worse_is_higher)
                    comparisons[metric.name] = asdict(found)
            samples = {name: list(values.values()) for name, values in rounds.items() if values}
            medians = {name: statistics.median(values) for name, values in samples.items()}
            cell = {
                "name": f"{peer['name']}, {concurrency} in flight",
                "server": peer["name"],
                "concurrency": concurrency,
            }
            cells.append({**cell, "medians": medians, "comparisons": comparisons, "samples": samples})
    return cells


def _by_round(peer: dict[str, Any], concurrency: int, metric: Metric) -> dict[int, float]:
    found = {}
    for turn in peer["turns"]:
        for load in turn["loads"]:
            value = load[metric.name]
            value = value["p50"] if isinstance(value, dict) else value
            if load["concurrency"] == concurrency and value is not None:  # None: TPOT of answers of one token
                found[turn["round"]] = value
    return found


def doubts(result: Mapping[str, Any]) -> list[str]:
    """The measurements that are missing, and why."""
    done, asked = result["rounds"], result["rounds_asked"]
    found = [f"{own['name']} was left out: {own['fault'].splitlines()[0]}" for own in result["peers"] if own["fault"]]
    if result["error"] or done < asked:
        found.insert(0, f"{result['error'] or 'the time limit was reached'}: {done} of {asked} rounds")
    return found


def figures(result: Mapping[str, Any]) -> Table:
    """A row for each concurrency and server; the servers of one concurrency stand together."""
    rows = sorted(result["cells"], key=lambda cell: result["load"]["concurrency"].index(cell["concurrency"]))
    note = (
        f"Medians over rounds; ratios to {result['peers'][0]['name']} with their bootstrap 95 % interval, paired by round. A "
        "ratio above 1 is slower for times and faster for tokens/s."
    )
    return Table(title="Figures", columns=_COLUMNS, rows=rows, note=note)
