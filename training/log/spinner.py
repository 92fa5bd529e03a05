"""Counts the seconds of a step without results, on rank 0's terminal."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def spinner(text: str, environment: Mapping[str, str]) -> AbstractContextManager[object]:
    """Show ``text`` and the time it takes. ``environment``: has RANK under torchrun; other ranks than 0 show nothing."""
    if not sys.stderr.isatty() or environment.get("RANK", "0") != "0":
        return nullcontext()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(text, total=None)
    return progress
