"""Prints a run's progress: plain lines, plus a progress bar on a terminal."""

import sys
from typing import TextIO

from tightwire.comm.sizes import format_bytes
from tightwire.training.log.run_log import EvaluationRecord, StepRecord


class Terminal:
    """Plain lines without a progress bar."""

    def __init__(self, steps: int, every: int, stream: TextIO) -> None:
        self._steps, self._every, self._stream = steps, every, stream

    def say(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def step(self, record: StepRecord) -> None:
        if record.step % self._every == 0 or record.step in (1, self._steps):
            self.say(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {describe(record)}")

    def evaluation(self, record: EvaluationRecord) -> None:
        self.say(f"held-out loss {record.held_out_loss:.4f} after step {record.step} ({record.tokens} tokens)")
        for prompt, text in record.samples:
            self.say(f"    {prompt!r} -> {text!r}")

    def close(self) -> None:
        """Remove the progress bar, if there is one. ``say`` still works."""


class LiveTerminal(Terminal):
    """The same lines above a progress bar with the remaining time."""

    def __init__(self, steps: int, every: int, stream: TextIO, done: int) -> None:
        # rich takes 0.1 s to import.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(steps, every, stream)
        self._console = Console(file=stream)
        columns = (
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._bars = Progress(*columns, console=self._console, transient=True)
        self._task = self._bars.add_task("", total=steps, completed=done)
        self._bars.start()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        short = f"loss {record.loss:.3f}  {_count(record.tokens_per_s)} tok/s"
        self._bars.update(self._task, completed=record.step, description=short)
        super().step(record)

    def close(self) -> None:
        self._bars.stop()


class Silent(Terminal):
    """Prints nothing."""

    def say(self, text: str) -> None:
        pass


def make_terminal(steps: int, every: int, *, rank: int, done: int) -> Terminal:
    """A progress bar if stderr is a terminal, else lines; nothing on other ranks than 0. ``done``: steps so far."""
    stream = sys.stderr
    if rank:
        return Silent(steps, every, stream)
    return LiveTerminal(steps, every, stream, done) if stream.isatty() else Terminal(steps, every, stream)


def describe(record: StepRecord) -> str:
    """The record on one line."""
    mfu = "" if record.mfu is None else f"  MFU {100 * record.mfu:.1f} %"
    return (
        f"loss {record.loss:.4f}  lr {record.lr:.3g}  grad {record.grad_norm:.3g}  "
        f"{_count(record.tokens_per_s)} tok/s{mfu}  memory {format_bytes(record.memory_bytes)}  "
        f"wire {format_bytes(record.wire_bytes)}  waited {record.exposed_ms:.0f} ms of {1e3 * record.seconds:.0f}"
    )


def _count(number: float) -> str:
    """Three significant digits, such as ``12.3k``."""
    for unit in ("", "k"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}M"
