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
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_FILE_WIDTH = 160  # columns in a file or a pipe
_LINE_SECONDS = 15.0  # between two lines of progress in a file or a pipe
_LEAST_SECONDS, _LEAST_SHARE = 2.0, 0.02  # of a task, before its remaining time can be estimated


def make_console() -> Console:
    """A console as wide as the terminal; in a file or a pipe rich would otherwise cut tables to 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def describe_seconds(seconds: float) -> str:
    """``seconds`` as "40 s" or "3:05 min"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02d} min"


class ProgressLines(Progress):
    """Prints a plain line in place of a bar: as soon as the remaining time can be estimated, then every ``_LINE_SECONDS``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._next_line = 0.0
        self._estimated: set[TaskID] = set()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        if self._tasks[task_id].total is None and changes.get("total") is not None:
            self.reset(task_id)  # its rate is that of the time with a known total
        super().update(task_id, **changes)
        self._print_when_due(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_when_due(task_id)

    def _print_when_due(self, task_id: TaskID) -> None:
        now, task = time.monotonic(), self._tasks[task_id]
        self._next_line = self._next_line or now + _LINE_SECONDS
        left = _left(task)
        if now < self._next_line and (left is None or task_id in self._estimated):
            return
        self._next_line = now + _LINE_SECONDS
        self._estimated |= set() if left is None else {task_id}
        done = "" if task.total is None else f", {task.completed:.0f} of {task.total:.0f} done"
        after = "" if left is None else f", about {describe_seconds(left)} left"
        elapsed = describe_seconds(task.elapsed or 0)
        self.console.print(f"{task.description}{done}, {elapsed}{after}", markup=False, soft_wrap=True)


def _left(task: Task) -> float | None:
    """Seconds until ``task`` is complete, at its rate so far, or None while it is too early to say."""
    elapsed = task.elapsed or 0.0
    if task.total is None or elapsed < _LEAST_SECONDS or task.completed < max(1.0, _LEAST_SHARE * task.total):
        return None
    return elapsed / task.completed * (task.total - task.completed)


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
        speed_estimate_period=600.0,
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
