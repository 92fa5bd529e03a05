"""Turns rounds into cells, a table and plots: medians for each server and load, and ratios to the first server."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tightwire.bench.report.page import Item, Text, lines
from tightwire.bench.report.statistics import compare
from tightwire.bench.report.table import Column, Metric, Table

METRICS = (
    Metric(name="ttft_s", unit="ms", scale=1e3),
    Metric(name="tpot_s", unit="ms", scale=1e3),
    Metric(name="output_tokens_per_s", unit="tokens/s", worse_is_higher=False),
)
_TITLES = {"ttft_s": "TTFT, ms", "tpot_s": "TPOT, ms", "output_tokens_per_s": "output, tokens/s"}
_MANY_OTHERS = 0.1  # of the cores
_MANY_IDLE = 0.02
_IN_FLIGHT = Column("in flight", "concurrency", "d")


def summarize(peers: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """One cell for each server and concurrency. ``samples`` holds the median of each round.

    ``comparisons`` is server / first server by metric, paired by round; empty for the first server itself.
    """
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
            cells.append(
                {
                    "name": f"{peer['name']}, {concurrency} in flight",
                    "server": peer["name"],
                    "concurrency": concurrency,
                    "medians": {name: statistics.median(values) for name, values in samples.items()},
                    "comparisons": comparisons,
                    "samples": samples,
                }
            )
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
    """Reasons to distrust the figures; missing measurements come first."""
    peers, done, asked = result["peers"], result["rounds"], result["rounds_asked"]
    found = []
    if result["error"] or done < asked:
        found.append(f"{result['error'] or 'the time limit was reached'}: {done} of {asked} rounds")
    found += [f"{peer['name']} was left out: {reason(peer['fault'])}" for peer in peers if peer["fault"]]
    for peer in peers:
        others, idle = (_highest(peer, key) or 0.0 for key in ("others_share", "idle_share"))
        if others >= _MANY_OTHERS:
            found.append(f"other programs used up to {others:.0%} of the cores while {peer['name']} was measured")
        if idle >= _MANY_IDLE:
            found.append(f"idle servers used up to {idle:.1%} of the cores while {peer['name']} was measured")
        found += _wrong_lengths(peer, result["load"])
    return found


def _highest(peer: dict[str, Any], key: str) -> float | None:
    return max((turn[key] for turn in peer["turns"] if turn[key] is not None), default=None)


def _wrong_lengths(peer: dict[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The first load whose requests had other lengths than asked, which makes it incomparable."""
    for load in (load for turn in peer["turns"] for load in turn["loads"]):
        for kind, key, tokens in (
            ("prompt", "input_len", load["prompt_tokens"]),
            ("generated", "output_len", load["generated_tokens"]),
        ):
            each = tokens / load["succeeded"]
            if abs(each - asked[key]) > 0.02 * asked[key] + 0.5:
                return [f"{peer['name']}: {each:.1f} {kind} tokens a request instead of {asked[key]}, {load['name']}"]
    return []


def reason(fault: str) -> str:
    """One line of a fault that may end with a log: its first line, and the last error in the log."""
    first, *log = fault.splitlines()
    errors = [line.strip() for line in log if re.search(r"error\b\s*[:,]", line, re.IGNORECASE)]
    return f"{first} {errors[-1]}" if errors else first


def figures(result: Mapping[str, Any]) -> Table:
    """A row for each concurrency and server; the servers of one concurrency stand together."""
    rows = sorted(result["cells"], key=lambda cell: result["load"]["concurrency"].index(cell["concurrency"]))
    note = (
        f"Median over rounds; in brackets the ratio to {result['peers'][0]['name']} with its bootstrap 95 % interval, paired "
        "by round. A ratio above 1 is slower for times and faster for tokens/s."
    )
    texts = [{**row, **{metric.name: row for metric in METRICS}} for row in rows]
    columns = [Column("server", "server"), _IN_FLIGHT]
    columns += [Column(_TITLES[metric.name], metric.name, _figure(metric)) for metric in METRICS]
    return Table(title="Figures", columns=columns, rows=texts, note=note)


def _figure(metric: Metric) -> Callable[[Any], str]:
    def text(cell: Mapping[str, Any]) -> str:
        if metric.name not in cell["medians"]:
            return "-"
        median = f"{cell['medians'][metric.name] * metric.scale:.1f}"
        if (ratio := cell["comparisons"].get(metric.name)) is None:
            return median
        return f"{median} ({ratio['ratio']:.2f}, {ratio['low']:.2f} to {ratio['high']:.2f}: {ratio['verdict']})"

    return text


def make_sections(result: Mapping[str, Any]) -> list[Item]:
    items: list[Item] = [Text(title="Reasons to doubt the figures", lines=found)] if (found := doubts(result)) else []
    for metric in METRICS:
        rows = [
            {**cell, "y": cell["medians"][metric.name], "low": min(samples), "high": max(samples)}
            for cell in result["cells"]
            if (samples := cell["samples"].get(metric.name))
        ]
        y, low, high = (Column(_TITLES[metric.name], key, ".1f", metric.scale) for key in ("y", "low", "high"))
        better = "Lower is better" if metric.worse_is_higher else "Higher is better"
        note = f"{better}. Median of rounds; bars: least and most."
        title = f"{_TITLES[metric.name].partition(',')[0]} by requests in flight"
        items.append(lines(title, rows, by="server", x=_IN_FLIGHT, y=y, interval=(low, high), ticks=True, note=note))
    return [*items, figures(result), _servers(result), _answers(result)]


def _servers(result: Mapping[str, Any]) -> Table:
    shares = ("idle_share", "others_share")
    rows = [{**peer, **{key: _highest(peer, key) for key in shares}} for peer in result["peers"]]
    columns = [
        Column("server", "name"),
        Column("multiplies in", "numbers"),
        Column("ready, s", "ready_s", ".1f"),
        Column("idle servers", "idle_share", ".1%"),
        Column("other programs", "others_share", ".1%"),
        Column("command", "command"),
    ]
    note = "Idle servers, other programs: the largest share of all cores that they used while this server was measured."
    return Table(title="Servers", columns=columns, rows=rows, note=note)


def _answers(result: Mapping[str, Any]) -> Table:
    prompts = result["check_prompts"]
    rows = [dict(zip(["server", *prompts], [peer["name"], *peer["answers"]], strict=False)) for peer in result["peers"]]
    columns = [Column(name, name) for name in ["server", *prompts]]
    return Table(title="Answers", columns=columns, rows=rows, note="Greedy, checked before the measurement.")
