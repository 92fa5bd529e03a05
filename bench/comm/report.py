"""How a result of ``bench comm`` is shown and kept: tables for eyes, JSON with every raw sample, CSV, an HTML page."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tightwire.bench.comm.words import COLUMNS, cell_texts, describe_setting
from tightwire.bench.report.result_files import ResultFiles
from tightwire.comm.sizes import format_bytes

SCHEMA = "tightwire.bench.comm/1"

_CSV_COLUMNS = [
    *("size", "algorithm", "calls", "median_us", "p99_us", "algbw_bytes_per_s", "busbw_bytes_per_s"),
    *("wire_bytes", "relative_error", "share_of_bound", "speed_up_over_native"),
]


def show_head(console: Console, facts: dict[str, Any]) -> None:
    """What is measured, in a line or two."""
    console.print(describe_setting(facts), soft_wrap=True)
    words = "times are the slowest rank's, from a barrier on; wire bytes are those of the rank that sends most\n"
    console.print(words, soft_wrap=True)


def show_size(console: Console, size: int, rows: Sequence[dict[str, Any]]) -> None:
    """Print the cells of one size."""
    table = Table(title=format_bytes(size), title_justify="left", title_style="bold")
    table.add_column("algorithm")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        if row["size"] == size:
            table.add_row(row["algorithm"], *cell_texts(row), style="red" if row["faults"] else None)
    console.print(table)
    console.print()


def keep(files: ResultFiles, result: dict[str, Any], samples: Sequence[Sequence[float]]) -> None:
    """``samples``: raw seconds, for each of the result's cells."""
    # Matplotlib takes half a second to import, belongs to an extra, and is of use only here.
    from tightwire.bench.comm.page import make_page

    keep_raw(files, result, samples)
    files.write_csv(_CSV_COLUMNS, map(_csv_row, result["cells"]))
    files.write_html(make_page(result))


def keep_raw(files: ResultFiles, result: dict[str, Any], samples: Sequence[Sequence[float]]) -> None:
    """The JSON alone: quick enough to be done while the ranks go on measuring."""
    cells = [{**cell, "samples_s": raw} for cell, raw in zip(result["cells"], samples, strict=True)]
    files.write_json({**result, "cells": cells})


def _csv_row(cell: dict[str, Any]) -> dict[str, Any]:
    seconds = cell["seconds"]
    return {**cell, "calls": seconds["n"], "median_us": seconds["p50"] * 1e6, "p99_us": seconds["p99"] * 1e6}
