"""The progress bar of all measurements: on stderr, gone when done, absent where stderr is no terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar() -> Progress:
    """Use it as a context; a task's ``total`` None shows that something goes on, without saying how far it is."""
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
    """Take the bar away while something is printed, whose first line would else begin behind it."""
    was_started = progress.live.is_started
    if was_started:
        progress.stop()
    try:
        yield
    finally:
        if was_started:
            progress.start()
