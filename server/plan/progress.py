"""Shows start-up progress on standard error: bars on a terminal, lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TextIO

from tightwire.server.ipc.messages import Stage

_LINE_PERIOD_S = 5.0  # between two lines about the same unfinished stage


class Progress:
    """Progress of N ranks as plain lines: one when all ranks have finished a stage, and at most one every 5 s before
    that.
    """

    def __init__(self, num_ranks: int, write: Callable[[str], object]) -> None:
        self._num_ranks = num_ranks
        self._write = write
        self._fractions: dict[str, dict[int, float]] = {}
        self._seconds: dict[str, dict[int, float]] = {}
        self._last_line_s = time.monotonic()

    def say(self, text: str) -> None:
        """Write one line. Ignores a closed pipe (`serve 2>&1 | head`), which is no reason to stop serving."""
        with contextlib.suppress(OSError):
            self._write(text + "\n")
        self._last_line_s = time.monotonic()

    def fetching(self, what: str, fraction: float) -> None:
        """Report a download before the stages begin."""
        self._update(f"fetch {what}", 0, fraction)

    def stage(self, stage: Stage) -> None:
        self._update(stage.name, stage.rank, stage.fraction)
        if stage.seconds is None:
            return
        seconds = self._seconds.setdefault(stage.name, {})
        seconds[stage.rank] = stage.seconds
        if len(seconds) == self._num_ranks:
            self.say(f"{stage.name:>12}  {max(seconds.values()):5.1f} s")

    def summary(self) -> str:
        """Each finished stage with the seconds of its slowest rank."""
        return ", ".join(f"{name} {max(seconds.values()):.1f} s" for name, seconds in self._seconds.items())

    def close(self) -> None:
        """End the progress display; ``say`` still works."""

    def _update(self, name: str, rank: int, fraction: float) -> None:
        fractions = self._fractions.setdefault(name, {})
        fractions[rank] = fraction
        if fraction < 1 and time.monotonic() - self._last_line_s > _LINE_PERIOD_S:
            self.say(f"{name:>12}  {_percent(fractions)}")


class TerminalProgress(Progress):
    """The same lines above one progress bar per rank; ``close`` removes the bars."""

    def __init__(self, num_ranks: int) -> None:
        # rich takes 0.1 s to import and is only needed on a terminal.
        from rich.console import Console
        from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bars

        console = Console(stderr=True)
        columns = (TextColumn("{task.description:>20}"), BarColumn(), TaskProgressColumn())
        self._bars = Bars(*columns, console=console, transient=True)
        self._closed = False
        self._tasks: dict[int, TaskID] = {}
        # Let the terminal wrap long lines: rich would insert line breaks into text that people copy.
        super().__init__(
            num_ranks, lambda text: console.print(text, end="", highlight=False, markup=False, soft_wrap=True)
        )

    def close(self) -> None:
        self._closed = True
        self._bars.stop()

    def _update(self, name: str, rank: int, fraction: float) -> None:
        if not self._closed:
            # Bars hide the cursor. Start them late, so that a signal during imports leaves the terminal unchanged.
            self._bars.start()
        text = f"rank {rank}  {name}"
        if rank not in self._tasks:
            self._tasks[rank] = self._bars.add_task(text, total=1.0)
        self._bars.update(self._tasks[rank], description=text, completed=fraction)


def make_progress(num_ranks: int, stream: TextIO = sys.stderr) -> Progress:
    """Bars on a terminal, lines elsewhere."""
    return TerminalProgress(num_ranks) if stream.isatty() else Progress(num_ranks, stream.write)


def _percent(fractions: dict[int, float]) -> str:
    if not any(fractions.values()):
        return "..."  # a stage without a known fraction
    return ", ".join(f"rank {rank} {100 * fraction:.0f} %" for rank, fraction in sorted(fractions.items()))
