"""A run in words and drawings: the Markdown table, and the page with plots."""

import textwrap
from collections.abc import Sequence
from typing import Any

from summary import FIGURES, Figure, doubts, reason

from tightwire.bench.report.environment import environment_facts
from tightwire.bench.report.html import Page, Section, TableView, render
from tightwire.bench.report.plots import Plot, Series, draw


def make_page(result: dict[str, Any]) -> str:
    load = result["load"]
    return render(
        Page(
            title="Servers side by side, same weights, one machine",
            lead=f"{load['input_len']} prompt tokens, {load['output_len']} generated; {result['rounds']} rounds, each server "
            "once in each, in random order; all servers up, one at a time under load.",
            alarms=doubts(result),
            sections=[
                *(_plot(result, figure) for figure in FIGURES if result["cells"]),
                _figures(result),
                _servers(result),
                _answers(result),
            ],
            facts=[*environment_facts(result["environment"]), ("run took", f"{result['took_s']:.0f} s")],
        )
    )


def markdown(result: dict[str, Any]) -> str:
    rows = [*_rows(result), *_left_out(result)]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" + "|--:" * (len(_COLUMNS) - 1) + "|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    lines += ["", *(f"- {doubt}" for doubt in doubts(result))]
    return "\n".join(lines) + "\n"


def _plot(result: dict[str, Any], figure: Figure) -> Section:
    series = []
    for number, peer in enumerate(result["peers"]):
        own = [cell for cell in result["cells"] if (cell["server"], cell["figure"]) == (peer["name"], figure.key)]
        if own:
            series.append(
                Series(
                    name=peer["name"],
                    number=number,
                    x=[cell["concurrency"] for cell in own],
                    y=[cell["median"] * figure.scale for cell in own],
                    low=[min(cell["rounds"]) * figure.scale for cell in own],
                    high=[max(cell["rounds"]) * figure.scale for cell in own],
                )
            )
    better = "Lower is better" if figure.worse_is_higher else "Higher is better"
    title = f"{figure.title} by requests in flight"
    counts = result["load"]["concurrency"]
    plot = Plot(
        name=figure.key.replace("_", "-"),
        title=title,
        x_label="requests in flight",
        y_label=f"{figure.title}, {figure.unit}",
        series=series,
        ticks=(counts, [str(count) for count in counts]),
    )
    return Section(title=title, words=[f"{better}. Median of rounds; bars: the least and the most."], svg=draw(plot))


def _figures(result: dict[str, Any]) -> Section:
    words = (
        f"Median over rounds; in brackets the ratio to {result['peers'][0]['name']} with its bootstrap 95 % interval, "
        "rounds being pairs. For times above 1 is slower, for tokens/s below 1."
    )
    rows = [*_rows(result), *_left_out(result)]
    wrong = frozenset(range(len(_rows(result)), len(rows)))
    return Section(title="Figures", words=[words], table=TableView(columns=_COLUMNS, rows=rows, wrong=wrong), wide=True)


_COLUMNS = ["server", "in flight", *(f"{figure.title}, {figure.unit}" for figure in FIGURES)]


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """What is to be compared stands together: all servers of one number of requests in flight."""
    cells = {(cell["server"], cell["concurrency"], cell["figure"]): cell for cell in result["cells"]}
    return [
        [peer["name"], str(count), *(_cell(cells.get((peer["name"], count, figure.key)), figure) for figure in FIGURES)]
        for count in result["load"]["concurrency"]
        for peer in result["peers"]
        if peer["turns"]
    ]


def _left_out(result: dict[str, Any]) -> list[list[str]]:
    return [
        [peer["name"], "-", _why(peer["fault"]), "-", "-"]
        for peer in result["peers"]
        if peer["fault"] or not peer["turns"]
    ]


def _why(fault: str | None) -> str:
    if fault is None:
        return "not measured yet"
    return f"left out: {textwrap.shorten(reason(fault), _MOST_CHARS, placeholder=' ...')}"


_MOST_CHARS = 80  # of a reason within the table; the whole one is in the lines above or below it


def _cell(cell: dict[str, Any] | None, figure: Figure) -> str:
    if cell is None:
        return "-"
    text = f"{cell['median'] * figure.scale:.1f}"
    ratio = cell["comparison"]
    if ratio is None:
        return text
    return f"{text} ({ratio['ratio']:.2f}, {ratio['low']:.2f} to {ratio['high']:.2f}: {ratio['verdict']})"


def _servers(result: dict[str, Any]) -> Section:
    rows = [
        [
            peer["name"],
            peer["numbers"],
            f"{peer['ready_s']:.1f}" if peer["ready_s"] is not None else "-",
            _share(turn["idle_share"].get(peer["name"]) for other in result["peers"] for turn in other["turns"]),
            _share(turn["others_share"] for turn in peer["turns"]),
            peer["command"],
        ]
        for peer in result["peers"]
    ]
    columns = ["server", "multiplies by", "ready, s", "idle, of the cores", "others, of the cores", "command"]
    table = TableView(columns=columns, rows=rows, num_words=2)
    words = (
        "Idle: the most that this server used while another was measured. Others: the most that programs outside of the "
        "run used while this one was."
    )
    return Section(title="Servers", words=[words], table=table, wide=True)


def _share(shares: Any) -> str:
    known = [share for share in shares if share is not None]
    return f"{max(known):.1%}" if known else "-"


def _answers(result: dict[str, Any]) -> Section:
    rows: Sequence[list[str]] = [
        [peer["name"], *(repr(answer) for answer in peer["answers"])] for peer in result["peers"] if peer["answers"]
    ]
    table = TableView(
        columns=["server", *result["check_prompts"]], rows=rows, num_words=1 + len(result["check_prompts"])
    )
    words = ["Greedy, checked before anything was measured."]
    return Section(title="Answers", words=words, table=table, wide=True)
