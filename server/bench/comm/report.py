"""How a result of ``bench comm`` is shown and kept: tables for eyes, JSON with every raw sample, CSV, an HTML page."""

import csv
import json
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tightwire.server.bench.comm.words import COLUMNS, cell_texts, describe_others, describe_setting
from tightwire.server.sizes import format_bytes

SCHEMA = "tightwire.bench.comm/1"

_QUIET_SHARE = 0.1  # of the cores that others may use before it is worth a word
_FILE_WIDTH = 120  # of lines that go to a file or a pipe
_CSV_COLUMNS = [
    *("size", "algorithm", "calls", "median_us", "p99_us", "algbw_bytes_per_s", "busbw_bytes_per_s"),
    *("wire_bytes", "relative_error", "share_of_bound", "speed_up_over_native"),
]


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


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


def show_doubts(console: Console, facts: dict[str, Any]) -> None:
    """Why to read the figures with care, if at all."""
    if facts["others_share"] > _QUIET_SHARE:
        console.print(f"note: {describe_others(facts)}; times are too long by that\n", style="yellow", soft_wrap=True)


class ResultFiles:
    """JSON, CSV and page of one run in a folder of the user's.

    Raises:
        ValueError: the folder cannot be made or written, or nothing here draws plots; found out before anything is
            measured.
    """

    def __init__(self, folder: Path, label: str) -> None:
        if find_spec("matplotlib") is None:
            raise ValueError(
                "--output draws plots with matplotlib, which is not installed: pip install tightwire[bench]"
            )
        stem = f"{label}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._json, self._csv, self._page = (folder / f"{stem}.{kind}" for kind in ("json", "csv", "html"))
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ValueError(f"--output {folder} cannot be written: {error}") from error

    @property
    def paths(self) -> list[str]:
        return [str(self._json), str(self._csv), str(self._page)]

    def write(self, result: dict[str, Any], samples: Sequence[Sequence[float]]) -> None:
        """``samples``: raw seconds, for each of the result's cells."""
        # Matplotlib takes half a second to import, belongs to an extra, and is of use only here.
        from tightwire.server.bench.comm.page import make_page

        cells = [{**cell, "samples_s": raw} for cell, raw in zip(result["cells"], samples, strict=True)]
        self._json.write_text(json.dumps({**result, "cells": cells}) + "\n", encoding="utf-8")
        with self._csv.open("w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, _CSV_COLUMNS, extrasaction="ignore")
            rows.writeheader()
            for cell in cells:
                seconds = cell["seconds"]
                times = {"median_us": seconds["p50"] * 1e6, "p99_us": seconds["p99"] * 1e6}
                rows.writerow({**cell, "calls": seconds["n"], **times})
        self._page.write_text(make_page(result), encoding="utf-8")
