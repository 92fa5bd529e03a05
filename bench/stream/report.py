"""How a result of ``bench stream`` is shown and kept: tables for eyes, JSON with every raw sample, CSV, an HTML page."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tightwire.bench.report.quiet import show_others
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.stream.words import (
    COLUMNS,
    arm_text,
    cell_texts,
    crowds,
    describe_setting,
    forecast_line,
    load_text,
    verdict,
)

SCHEMA = "tightwire.bench.stream/1"

_CSV_COLUMNS = [
    *(
        "tp",
        "dp",
        "source",
        "io",
        "codec",
        "rate_bytes_per_s",
        "step_kind",
        "rows",
        "bytes_per_step",
        "bytes_per_s",
        "fetch_s",
    ),
    *(
        "raw_s",
        "compute_s",
        "step_s",
        "bound_by",
        "over_bound",
        "over_source_bound",
        "over_cores_bound",
        "over_wire_bound",
        "overlap",
    ),
    *("speed_up_over_none", "tokens_per_s", "ttft_s", "break_even_rows", "same_tokens"),
]


def show_head(console: Console, facts: dict[str, Any]) -> None:
    """What is measured, and what is not."""
    console.print(describe_setting(facts), soft_wrap=True)
    for words in facts["left_out"]:
        console.print(words, soft_wrap=True)
    console.print()


def show_arm(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the cells of one arm."""
    table = Table(title=f"{arm_text(rows[0])}, tp {rows[0]['tp']}", title_justify="left", title_style="bold")
    table.add_column("step")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(load_text(row), *cell_texts(row), style="red" if row["faults"] else None)
    console.print(table)
    console.print(forecast_line(rows[0]), soft_wrap=True)
    console.print()


def show_end(console: Console, result: dict[str, Any]) -> None:
    """What all cells come to, and why to read them with care."""
    for words in (verdict(result["cells"]), *crowds(result)):
        console.print(words, soft_wrap=True)
    console.print()
    show_others(console, result)


def keep(files: ResultFiles, result: dict[str, Any]) -> None:
    # Matplotlib takes half a second to import, belongs to an extra, and is of use only here.
    from tightwire.bench.stream.page import make_page

    files.write_json(result)
    files.write_csv(_CSV_COLUMNS, ({**row, "step_s": row["seconds"]["p50"]} for row in result["cells"]))
    files.write_html(make_page(result))


def without_samples(result: dict[str, Any]) -> dict[str, Any]:
    """What fits on one line."""
    cells = [{name: value for name, value in row.items() if name != "samples_s"} for row in result["cells"]]
    return {**result, "cells": cells}
