"""The console on which a bench prints its tables, and the progress bar of all measurements."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_FILE_WIDTH = 160  # columns in a file or a pipe
_LINE_SECONDS = 30.0  # between two lines of progress in a file or a pipe


def make_console() -> Console:
    """As wide as the terminal; in a file or a pipe rich would otherwise cut tables to 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


class ProgressLines(Progress):
    """Prints a plain line every ``_LINE_SECONDS`` in place of a bar."""

    _next_line = 0.0

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_when_due(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_when_due(task_id)

    def _print_when_due(self, task_id: TaskID) -> None:
        now = time.monotonic()
        self._next_line = self._next_line or now + _LINE_SECONDS
        if now < self._next_line:
            return
        self._next_line = now + _LINE_SECONDS
        task = self._tasks[task_id]
        done = "" if task.total is None else f", {task.completed:.0f} of {task.total:.0f} done"
        self.console.print(f"{task.description}{done}, {task.elapsed or 0:.0f} s", markup=False)


def progress_bar() -> Progress:
    """A context manager that shows a bar on stderr, or plain lines if stderr is no terminal."""
    if not sys.stderr.isatty():
        return ProgressLines(console=Console(stderr=True), disable=True)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
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
