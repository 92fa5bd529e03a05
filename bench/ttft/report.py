"""How a result of ``bench ttft`` is shown and kept: tables for eyes, JSON with every raw sample, CSV with a row per request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tightwire.bench.report.quiet import show_others
from tightwire.bench.ttft.facts import Facts
from tightwire.bench.ttft.options import TtftOptions
from tightwire.bench.ttft.recommend import excluded, recommend
from tightwire.bench.ttft.summary import PARTS, Measured, rows
from tightwire.bench.ttft.words import (
    LEGENDS,
    OTHER_COLUMNS,
    RANDOM_WEIGHTS,
    TTFT_COLUMNS,
    describe_link,
    describe_setting,
    other_texts,
    recommended_lines,
    ttft_texts,
)

SCHEMA = "tightwire.bench.ttft/1"
CSV_COLUMNS = [
    *("prompt_len", "concurrency", "arm", "round", "place", "ttft_s", "tpot_s", "e2e_s", "decode_comm_share"),
    *("server_ttft_s", *PARTS),
]


def facts(options: TtftOptions, found: Facts, environment: dict[str, Any]) -> dict[str, Any]:
    """What is known before anything was measured."""
    parallel = options.config.parallel
    return {
        "schema": SCHEMA,
        "environment": environment,
        "label": options.label,
        "model": found.model,
        "dtype": found.dtype,
        "weights": found.weights,
        "device": found.device,
        "tp": parallel.tp,
        "nodes": parallel.nodes,
        "num_layers": found.proof.shape.num_layers,
        "hidden_size": found.hidden_size,
        "seed": options.config.model.seed,
        "random_weights": options.config.model.model.startswith("random:"),
        "options": {
            "algorithms": list(options.algorithms),
            "baseline": options.baseline_name,
            "prompt_lens": list(options.prompt_lens),
            "concurrency": list(options.concurrency),
            "repeats": options.repeats,
            "output_len": options.output_len,
            "answers": options.answers,
            "error_budget": options.error_budget,
            "link": parallel.link,
        },
    }


def result(
    known: Mapping[str, Any], measured: Measured | None, options: TtftOptions, error: str | None
) -> dict[str, Any]:
    """The whole result, without raw samples."""
    return {
        **known,
        "cells": [] if measured is None else rows(measured),
        "recommended": [] if measured is None or error else [r.plain() for r in recommend(measured, options)],
        "over_budget": [] if measured is None else [a.name for a in excluded(measured.arms, options.error_budget)],
        "error": error,
    }


def samples(measured: Measured) -> list[dict[str, Any]]:
    """Every timed request, and every entry's counters once, beside its first request."""
    return [
        {
            **row,
            "itl_s": request.itl_s,
            "token_ids": request.token_ids,
            "wall_s": entry.wall_s,
            "counts": [count._asdict() for count in entry.counts] if request is entry.requests[0] else None,
        }
        for (entry, request), row in zip(_requests(measured), csv_rows(measured), strict=True)
    ]


def csv_rows(measured: Measured) -> list[dict[str, Any]]:
    """Plain data of every timed request, by ``CSV_COLUMNS``."""
    return [
        {
            "prompt_len": entry.cell.prompt_len,
            "concurrency": entry.cell.concurrency,
            "arm": entry.arm.name,
            "round": entry.round,
            "place": entry.place,
            "ttft_s": request.ttft_s,
            "tpot_s": request.tpot_s,
            "e2e_s": request.e2e_s,
            "decode_comm_share": request.decode_share,
            "server_ttft_s": request.parts.get("ttft_s"),
            **{part: request.parts.get(part) for part in PARTS},
        }
        for entry, request in _requests(measured)
    ]


def _requests(measured: Measured) -> Iterator[tuple[Any, Any]]:
    for entry in measured.entries:
        for request in entry.requests:
            yield entry, request


def show_head(console: Console, known: Mapping[str, Any], num_entries: int) -> None:
    """What is to be measured, in a few lines."""
    console.print(describe_setting(known), soft_wrap=True)
    words = f"{num_entries} turns, of which each arm's first two in a cell warm up and are not counted\n"
    console.print(words, soft_wrap=True)


def show_expected(console: Console, seconds: float) -> None:
    """How long the timed part will take, known when everything has warmed up."""
    time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
    console.print(f"warmed up, and each message of every rank is what it should be; the blocks take about {time}\n")


def show(console: Console, shown: Mapping[str, Any]) -> None:
    """Two tables for each cell, then what to take."""
    console.print(f"wire: {describe_link((shown.get('comm') or {}).get('link'))}\n", soft_wrap=True, markup=False)
    cells = dict.fromkeys((row["prompt_len"], row["concurrency"]) for row in shown["cells"])
    for prompt_len, concurrency in cells:
        own = [row for row in shown["cells"] if (row["prompt_len"], row["concurrency"]) == (prompt_len, concurrency)]
        title = f"{prompt_len} prompt tokens, {concurrency} at a time"
        console.print(_table(f"{title}: TTFT, ms", TTFT_COLUMNS, [[r["arm"], *ttft_texts(r)] for r in own]))
        console.print(_table(f"{title}: where it goes", OTHER_COLUMNS, [[r["arm"], *other_texts(r)] for r in own]))
        console.print()
    for legend in LEGENDS:
        console.print(legend, style="dim", soft_wrap=True)
    for line in recommended_lines(shown):
        console.print(line, style="bold", markup=False, soft_wrap=True)
    if shown["random_weights"]:
        console.print(f"note: {RANDOM_WEIGHTS}", style="yellow", soft_wrap=True)
    show_others(console, shown)
    console.print()


def _table(title: str, columns: Sequence[str], texts: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("algorithm", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for cells in texts:
        table.add_row(*cells)
    return table
