"""Writes the run's log: one JSON line per step and evaluation, and TensorBoard scalars if enabled."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tightwire.progress import StepBar
from tightwire.run_page import LOG, drop_after
from tightwire.sizes import format_bytes, format_count


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step; ``step`` counts from 1. ``loss`` is the mean over all ranks' tokens."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # in this step, over all ranks
    seconds: float
    mfu: float  # model FLOPs utilization, without recomputation
    memory_bytes: int  # highest peak of any rank so far
    wire_bytes: int  # sent by this rank in this step
    exposed_ms: float  # time that this rank waited for communication in this step
    figures: Mapping[str, float] = field(default_factory=dict)  # means over all ranks, such as accuracy

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def values(self) -> dict[str, Any]:
        values = {**asdict(self), "tokens_per_s": self.tokens_per_s}
        return values | values.pop("figures")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """One evaluation of the weights after ``step`` steps. ``samples`` holds (prompt, continuation) pairs.

    ``held_out_loss`` None: answers were rewarded instead. ``tokens``: tokens, pairs or answers.
    """

    step: int
    held_out_loss: float | None
    tokens: int
    samples: tuple[tuple[str, str], ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        values = {**asdict(self), "samples": [list(sample) for sample in self.samples]}
        if self.held_out_loss is None:
            del values["held_out_loss"]
        return values | {f"held_out_{name}": figure for name, figure in values.pop("figures").items()}


class RunLog:
    """The run's log file and TensorBoard files. ``after_step``: the run resumes after this step, so later lines are dropped."""

    def __init__(self, run: Path, *, after_step: int, tensorboard: bool) -> None:
        """Raises ValueError: the log file cannot be written."""
        self._path = run / LOG
        try:
            drop_after(self._path, after_step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"run: the log {self._path} cannot be written: {error}") from None
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._writer = SummaryWriter(run / "tensorboard", purge_step=after_step + 1)

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        """Raises OSError: the disk failed. The file's buffer keeps the line, which a later call writes."""
        values = record.values()
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self._writer.add_scalar(name, value, record.step)
            for prompt, text in values.get("samples", ()):
                self._writer.add_text(prompt, text, record.step)

    def close(self) -> None:
        with suppress(OSError):  # lines that `add` failed to write fail again here; do not hide the run's own error
            self._file.close()
        if self._writer is not None:
            self._writer.close()


class Terminal(StepBar):
    """The lines and the bar of a run of ``steps`` steps. Ranks other than 0 print nothing."""

    def __init__(self, steps: int, every: int, *, rank: int = 0, done: int = 0, stream: TextIO | None = None) -> None:
        """``every``: steps between two lines. ``done``: steps so far."""
        super().__init__(steps, done=done, is_quiet=rank > 0, stream=stream)
        self._steps, self._every = steps, every

    def step(self, record: StepRecord) -> None:
        short = f"loss {record.loss:.3f}  {format_count(record.tokens_per_s)} tok/s"
        self.move(record.step, short)
        if record.step % self._every == 0 or record.step in (1, self._steps):
            self.say(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {describe(record)}")

    def evaluation(self, record: EvaluationRecord) -> None:
        figures = _figures(record.figures)
        loss = "" if record.held_out_loss is None else f" loss {record.held_out_loss:.4f}"
        self.say(f"held-out{loss}{figures} after step {record.step} ({record.tokens} tokens)")
        for prompt, text in record.samples:
            self.say(f"    {prompt!r} -> {text!r}")


def describe(record: StepRecord) -> str:
    """The record on one line."""
    return (
        f"loss {record.loss:.4f}{_figures(record.figures)}  lr {record.lr:.3g}  grad {record.grad_norm:.3g}  "
        f"{format_count(record.tokens_per_s)} tok/s  MFU {100 * record.mfu:.1f} %  memory {format_bytes(record.memory_bytes)}  "
        f"wire {format_bytes(record.wire_bytes)}  waited {record.exposed_ms:.0f} ms of {1e3 * record.seconds:.0f}"
    )


def _figures(figures: Mapping[str, float]) -> str:
    return "".join(f"  {name} {figure:.3g}" for name, figure in figures.items())
