"""Shows and writes results of ``bench train``: tables, JSON, CSV and an HTML page."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.train.findings import find
from tightwire.bench.train.words import (
    CHECK_COLUMNS,
    COLUMNS,
    cell_texts,
    check_texts,
    describe_finding,
    describe_link,
    describe_others,
    describe_predictions,
    describe_setting,
)

SCHEMA = "tightwire.bench.train/1"

_QUIET_SHARE = 0.1  # of the cores; print a note if other programs use more
_CSV_COLUMNS = [
    *(
        "link",
        "arm",
        "step_s",
        "node_bytes",
        "node_payload_bytes",
        "node_wire_bytes",
        "payload_over_formula",
        "waited_s",
    ),
    *("exposed_s", "computing_s", "predicted_s", "prediction_error", "bound_s", "over_bound", "loss_error"),
    *("peak_bytes", "formula_peak_bytes", "resident_bytes"),
]


def show_head(console: Console, facts: dict[str, Any]) -> None:
    console.print(describe_setting(facts), soft_wrap=True)
    console.print()


def show_link(console: Console, link: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    console.print(describe_link(link), soft_wrap=True)
    for columns, texts in ((COLUMNS, cell_texts), (CHECK_COLUMNS, check_texts)):
        table = Table()
        table.add_column("arm")
        for name in columns:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(row["arm"], *texts(row), style="red" if row["faults"] else None)
        console.print(table)
    console.print()


def show_end(console: Console, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the findings of all rows, and notes about disturbances."""
    if any(row["prediction_error"] is not None for row in rows):
        console.print(describe_predictions(rows), soft_wrap=True)
    for finding in find(rows):
        console.print(describe_finding(finding), soft_wrap=True)
    if facts["others_share"] > _QUIET_SHARE:
        console.print(f"note: {describe_others(facts)}; times are too long by that\n", style="yellow", soft_wrap=True)


def keep(files: ResultFiles, result: dict[str, Any]) -> None:
    # Matplotlib is optional and takes half a second to import.
    from tightwire.bench.train.page import make_page

    files.write_json(result)
    files.write_csv(_CSV_COLUMNS, ({**row, "step_s": row["seconds"]["p50"]} for row in result["cells"]))
    files.write_html(make_page(result))


def without_samples(result: dict[str, Any]) -> dict[str, Any]:
    """The result without samples and extrapolations, for one line of output."""
    cells = [{name: value for name, value in row.items() if name != "samples_s"} for row in result["cells"]]
    return {**{name: value for name, value in result.items() if name != "on_paper"}, "cells": cells}
