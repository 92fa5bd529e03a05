"""Turns rounds into cells, a Markdown table and a page: medians per server and load, and ratios to the first server."""

import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tightwire.bench.report.html import Section
from tightwire.bench.report.plots import Plot, Series, draw
from tightwire.bench.report.statistics import compare
from tightwire.bench.report.table import Metric, TableView

METRICS = (
    Metric(name="ttft_s", unit="ms", scale=1e3),
    Metric(name="tpot_s", unit="ms", scale=1e3),
    Metric(name="output_tokens_per_s", unit="tokens/s", worse_is_higher=False),
)
_TITLES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "output_tokens_per_s": "Output"}
_COLUMNS = ["server", "in flight", *(f"{_TITLES[metric.name]}, {metric.unit}" for metric in METRICS)]
_MANY_OTHERS = 0.1  # of the cores
_MANY_IDLE = 0.02
_MAX_REASON_CHARS = 80  # in the table; the whole reason is in the lines above or below it


def summarize(peers: Sequence[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """One cell per server and concurrency. ``samples`` holds the median of each round.

    ``comparisons`` is server / first server by metric, paired by round; empty for the first server itself.
    """
    cells: list[dict[str, Any]] = []
    for peer in peers:
        for concurrency in dict.fromkeys(load["concurrency"] for turn in peer["turns"] for load in turn["loads"]):
            of_rounds = {metric.name: _by_round(peer, concurrency, metric) for metric in METRICS}
            comparisons = {}
            for metric in METRICS if peer is not peers[0] else ():
                base, own = _by_round(peers[0], concurrency, metric), of_rounds[metric.name]
                if common := sorted(base.keys() & own.keys()):
                    comparisons[metric.name] = asdict(
                        compare(
                            [base[number] for number in common],
                            [own[number] for number in common],
                            paired=True,
                            seed=seed,
                            worse_is_higher=metric.worse_is_higher,
                        )
                    )
            samples = {name: list(values.values()) for name, values in of_rounds.items() if values}
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
        found += _wrong_lengths(peer)
    return found


def _highest(peer: dict[str, Any], key: str) -> float | None:
    return max((turn[key] for turn in peer["turns"] if turn[key] is not None), default=None)


def _wrong_lengths(peer: dict[str, Any]) -> list[str]:
    """The first load whose requests had other lengths than asked, which makes it incomparable."""
    for turn in peer["turns"]:
        for load in turn["loads"]:
            for kind, tokens in (("prompt", load["prompt_tokens"]), ("generated", load["generated_tokens"])):
                each, wanted = tokens / load["succeeded"], turn["wanted"][kind]
                if abs(each - wanted) > 0.02 * wanted + 0.5:
                    return [f"{peer['name']}: {each:.1f} {kind} tokens a request instead of {wanted}, {load['name']}"]
    return []


def reason(fault: str) -> str:
    """One line of a fault that may end with a log: its first line, and the last error in the log."""
    first, *log = fault.splitlines()
    errors = [line.strip() for line in log if re.search(r"error\b\s*[:,]", line, re.IGNORECASE)]
    return f"{first} {errors[-1]}" if errors else first


def markdown(result: Mapping[str, Any]) -> str:
    rows = [*_rows(result), *_left_out(result)]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" + "|--:" * (len(_COLUMNS) - 1) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([*lines, "", *(f"- {doubt}" for doubt in doubts(result))]) + "\n"


def make_sections(result: Mapping[str, Any]) -> list[Section]:
    figures, left_out = _rows(result), _left_out(result)
    wrong = frozenset(range(len(figures), len(figures) + len(left_out)))
    words = (
        f"Median over rounds; in brackets the ratio to {result['peers'][0]['name']} with its bootstrap 95 % interval, paired "
        "by round. For times above 1 is slower, for tokens/s below 1."
    )
    return [
        *(_plot(result, metric) for metric in METRICS),
        Section(
            title="Figures",
            words=[words],
            table=TableView(columns=_COLUMNS, rows=[*figures, *left_out], wrong=wrong),
            wide=True,
        ),
        _servers(result),
        _answers(result),
    ]


def _plot(result: Mapping[str, Any], metric: Metric) -> Section:
    series = []
    for number, peer in enumerate(result["peers"]):
        own = [c for c in result["cells"] if c["server"] == peer["name"] and metric.name in c["samples"]]
        if own:
            samples = [[value * metric.scale for value in cell["samples"][metric.name]] for cell in own]
            series.append(
                Series(
                    name=peer["name"],
                    number=number,
                    x=[cell["concurrency"] for cell in own],
                    y=list(map(statistics.median, samples)),
                    low=list(map(min, samples)),
                    high=list(map(max, samples)),
                )
            )
    title, counts = _TITLES[metric.name], result["load"]["concurrency"]
    plot = Plot(
        name=metric.name.replace("_", "-"),
        title=f"{title} by requests in flight",
        x_label="requests in flight",
        y_label=f"{title}, {metric.unit}",
        series=series,
        ticks=(counts, [str(count) for count in counts]),
    )
    better = "Lower is better" if metric.worse_is_higher else "Higher is better"
    return Section(title=plot.title, words=[f"{better}. Median of rounds; bars: least and most."], svg=draw(plot))


def _rows(result: Mapping[str, Any]) -> list[list[str]]:
    """All servers of one concurrency stand together."""
    cells = {(cell["server"], cell["concurrency"]): cell for cell in result["cells"]}
    return [
        [peer["name"], str(count), *(_cell(cells.get((peer["name"], count)), metric) for metric in METRICS)]
        for count in result["load"]["concurrency"]
        for peer in result["peers"]
        if peer["turns"]
    ]


def _left_out(result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [peer["name"], "-", _shorten(peer["fault"]), "-", "-"]
        for peer in result["peers"]
        if peer["fault"] or not peer["turns"]
    ]


def _shorten(fault: str | None) -> str:
    if fault is None:
        return "not measured yet"
    return f"left out: {textwrap.shorten(reason(fault), _MAX_REASON_CHARS, placeholder=' ...')}"


def _cell(cell: dict[str, Any] | None, metric: Metric) -> str:
    if cell is None or metric.name not in cell["medians"]:
        return "-"
    text = f"{cell['medians'][metric.name] * metric.scale:.1f}"
    if (ratio := cell["comparisons"].get(metric.name)) is None:
        return text
    return f"{text} ({ratio['ratio']:.2f}, {ratio['low']:.2f} to {ratio['high']:.2f}: {ratio['verdict']})"


def _servers(result: Mapping[str, Any]) -> Section:
    rows = [
        [
            peer["name"],
            peer["numbers"],
            "-" if peer["ready_s"] is None else f"{peer['ready_s']:.1f}",
            *(
                "-" if (share := _highest(peer, key)) is None else f"{share:.1%}"
                for key in ("idle_share", "others_share")
            ),
            peer["command"],
        ]
        for peer in result["peers"]
    ]
    columns = ["server", "multiplies in", "ready, s", "idle servers", "other programs", "command"]
    words = "The most of all cores that idle servers and other programs used while this server was measured."
    return Section(title="Servers", words=[words], table=TableView(columns=columns, rows=rows, num_words=2), wide=True)


def _answers(result: Mapping[str, Any]) -> Section:
    prompts = result["check_prompts"]
    rows = [[peer["name"], *map(repr, peer["answers"])] for peer in result["peers"] if peer["answers"]]
    table = TableView(columns=["server", *prompts], rows=rows, num_words=1 + len(prompts))
    return Section(title="Answers", words=["Greedy, checked before the measurement."], table=table, wide=True)
