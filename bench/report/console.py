"""The console on which a bench prints its tables, and the progress bar of all measurements."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_FILE_WIDTH = 120  # columns in a file or a pipe


def make_console() -> Console:
    """As wide as the terminal; in a file or a pipe rich would otherwise cut tables to 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def progress_bar() -> Progress:
    """A context manager that shows a bar on stderr if that is a terminal; a task with ``total`` None shows only activity."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def paused(progress: Progress) -> Iterator[None]:
    """Hide the bar while something is printed; otherwise the first line would start behind the bar."""
    was_started = progress.live.is_started
    if was_started:
        progress.stop()
    try:
        yield
    finally:
        if was_started:
            progress.start()
