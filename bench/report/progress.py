"""The progress bar of all measurements: on stderr, removed when done, absent if stderr is not a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar() -> Progress:
    """A context manager; a task with ``total`` None shows activity without a share done."""
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
