"""Prints a run's progress on stderr: lines, and on a terminal a progress bar below them."""

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tightwire.comm.sizes import format_bytes
from tightwire.training.log.run_log import EvaluationRecord, StepRecord


class Terminal:
    """The lines and the bar of a run of ``steps`` steps. Ranks other than 0 print nothing."""

    def __init__(self, steps: int, every: int, *, rank: int = 0, done: int = 0, stream: TextIO | None = None) -> None:
        """``every``: steps between two lines. ``done``: steps so far."""
        self._steps, self._every = steps, every
        self._console = Console(file=stream or sys.stderr, quiet=rank > 0)
        columns = BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        has_bar = self._console.is_terminal and rank == 0
        self._bars = Progress(*columns, console=self._console, transient=True, disable=not has_bar)
        self._task = self._bars.add_task("", total=steps, completed=done)
        self._bars.start()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        short = f"loss {record.loss:.3f}  {_count(record.tokens_per_s)} tok/s"
        self._bars.update(self._task, completed=record.step, description=short)
        if record.step % self._every == 0 or record.step in (1, self._steps):
            self.say(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {describe(record)}")

    def evaluation(self, record: EvaluationRecord) -> None:
        self.say(f"held-out loss {record.held_out_loss:.4f} after step {record.step} ({record.tokens} tokens)")
        for prompt, text in record.samples:
            self.say(f"    {prompt!r} -> {text!r}")

    def close(self) -> None:
        """Remove the progress bar. ``say`` still works."""
        self._bars.stop()


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
