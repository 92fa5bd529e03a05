"""How a result is shown and kept: a table for eyes, JSON with every raw sample, CSV with one row per request."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tightwire.server.bench.serve.load import Arm

SCHEMA = "tightwire.bench.serve/1"

_LATENCIES = (
    ("ttft_s", "TTFT", "first text"),
    ("tpot_s", "TPOT", "later tokens"),
    ("itl_s", "ITL", "gaps in text"),
    ("e2e_s", "E2E", "whole answer"),
)
_CSV_COLUMNS = [
    *("arm", "load", "index", "sent_s", "late_s", "ttft_s", "tpot_s", "e2e_s"),
    *("num_prompt", "num_cached", "num_generated", "finish_reason", "error"),
]


def show(console: Console, summary: dict[str, Any], doubts: Sequence[str]) -> None:
    """Print one arm: latencies in milliseconds, then rates, then what to be careful about."""
    counts = f"{summary['succeeded']}/{summary['requested']} requests in {summary['duration_s']:.2f} s"
    table = Table(title=f"{summary['load']}: {counts}", title_justify="left", title_style="bold")
    table.add_column("ms")
    for name in ("n", "mean", "std", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for key, label, meaning in _LATENCIES:
        table.add_row(f"{label} [dim]{meaning}[/dim]", *_cells(summary[key]))
    console.print(table)
    console.print(
        f"{summary['output_tokens_per_s']:.1f} output tokens/s, {summary['total_tokens_per_s']:.1f} tokens/s in all, "
        f"{summary['requests_per_s']:.2f} requests/s, {summary['mean_in_flight']:.1f} in flight on average",
        soft_wrap=True,
    )
    for error, count in summary["errors"].items():
        console.print(f"failed {count} times: {error}", style="red", markup=False, soft_wrap=True)
    for doubt in [*doubts, *([f"stopped early: {summary['stopped']}"] if summary["stopped"] else [])]:
        console.print(f"note: {doubt}", style="yellow", markup=False, soft_wrap=True)
    console.print()


def _cells(distribution: dict[str, float] | None) -> list[str]:
    if distribution is None:
        return ["0", *["-"] * 5]
    return [
        str(distribution["n"]),
        *(f"{distribution[name] * 1e3:,.1f}" for name in ("mean", "std", "p50", "p90", "p99")),
    ]


class ResultFiles:
    """The JSON and CSV of one run in a folder of the user's, rewritten after every arm, so that a crash loses at most one.

    Raises:
        ValueError: the folder cannot be made or written, found out before anything is measured.
    """

    def __init__(self, folder: Path, label: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.json_path, self.csv_path = _free_names(folder, f"{label}-{stamp}")
            self.json_path.touch(exist_ok=False)
            self.csv_path.touch(exist_ok=False)
        except OSError as error:
            raise ValueError(f"--output {folder} cannot be written: {error}") from error

    @property
    def paths(self) -> list[str]:
        return [str(self.json_path), str(self.csv_path)]

    def write(self, result: dict[str, Any], arms: Sequence[Arm]) -> None:
        samples = [[_plain(sample) for sample in arm.samples] for arm in arms]
        full = [{**summary, "samples": raw} for summary, raw in zip(result["arms"], samples, strict=True)]
        _replace(self.json_path, json.dumps({**result, "arms": full}) + "\n")
        with self.csv_path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(_CSV_COLUMNS)
            for number, (arm, raw) in enumerate(zip(arms, samples, strict=True)):
                for entry in raw:
                    row = {"arm": number, "load": arm.load.name, **entry}
                    rows.writerow([row[column] for column in _CSV_COLUMNS])


def _plain(sample: Any) -> dict[str, Any]:
    return {**asdict(sample), "tpot_s": sample.tpot_s}


def _free_names(folder: Path, stem: str) -> tuple[Path, Path]:
    """Two names nobody uses: runs that begin in the same second must not overwrite each other."""
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        names = folder / f"{stem}{suffix}.json", folder / f"{stem}{suffix}.csv"
        if not any(name.exists() for name in names):
            return names
    raise FileExistsError(f"{folder} already holds a hundred results named {stem}")


def _replace(path: Path, text: str) -> None:
    """Write beside, then rename: a reader, or a crash, never sees half a file."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
