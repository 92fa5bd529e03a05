"""Writes the run's log: one JSON line per step and evaluation, TensorBoard scalars if enabled, and the loss plot."""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tightwire.comm.atomic_file import write_atomic
from tightwire.training.config.tree import LogConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step; ``step`` counts from 1. ``loss`` is the mean over all ranks' tokens."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int  # in this step, over all ranks
    seconds: float
    mfu: float | None  # model FLOPs utilization, without recomputation; None: the peak is not known
    memory_bytes: int  # highest peak of any rank so far
    wire_bytes: int  # sent by this rank in this step
    exposed_ms: float  # time that this rank waited for communication in this step

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """One evaluation of the weights after ``step`` steps. ``samples`` holds (prompt, continuation) pairs."""

    step: int
    held_out_loss: float
    tokens: int
    samples: tuple[tuple[str, str], ...] = ()

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "samples": [list(sample) for sample in self.samples]}


_SMOOTHING = 0.95  # weight of the previous mean
_FORMATS = ("svg", "png")


def plot_losses(lines: Sequence[Mapping[str, Any]], folder: Path) -> Path | None:
    """Draw ``loss.svg`` and ``loss.png`` from a log's lines. Returns the SVG's path, or None if the log has no steps."""
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    if not steps:
        return None
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*steps, strict=True), color="#9ecae1", linewidth=0.8, label="each step")
    axes.plot([step for step, _ in steps], _smooth([loss for _, loss in steps]), color="#08519c", label="running mean")
    held_out = [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#e6550d", markersize=4, label="held-out loss")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    paths = [folder / f"loss.{kind}" for kind in _FORMATS]
    for path in paths:
        figure.savefig(path)
    return paths[0]


def _smooth(losses: Sequence[float]) -> list[float]:
    mean, smoothed = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        smoothed.append(mean / (1 - _SMOOTHING**number))  # removes the bias of starting at 0
    return smoothed


LOG = "metrics.jsonl"
_TENSORBOARD = "tensorboard"
_SCALARS = [
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "memory_bytes",
    "wire_bytes",
    "exposed_ms",
    "held_out_loss",
]


class RunLog:
    """Only one rank writes it.

    ``after_step``: lines after the checkpoint of that step, from which the run resumes, are dropped.
    """

    def __init__(self, run: Path, *, after_step: int, tensorboard: bool) -> None:
        """Raises ValueError: the log file cannot be written."""
        self._path = run / LOG
        try:
            _drop_after(self._path, after_step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"run: the log {self._path} cannot be written: {error}") from None
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._writer = SummaryWriter(run / _TENSORBOARD, purge_step=after_step + 1)

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        """Raises OSError: the disk failed. The file's buffer keeps the line, and a later call writes it once
        there is room.
        """
        values = record.values()
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name in _SCALARS:
                if values.get(name) is not None:
                    self._writer.add_scalar(name, values[name], record.step)
            for prompt, text in values.get("samples", ()):
                self._writer.add_text(prompt, text, record.step)

    def plot(self) -> Path | None:
        """Plot the log so far. Returns None if it has no steps."""
        return plot_losses(read_log(self._path), self._path.parent)

    def close(self) -> None:
        with suppress(OSError):  # lines that `add` failed to write fail again here; do not hide the run's own error
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def missing_packages(config: LogConfig) -> dict[str, str]:
    """The outputs that are on but need a package that is not installed: what is not written, by the package's name."""
    needed = (("tensorboard", "TensorBoard files", config.tensorboard), ("matplotlib", "the loss plot", config.plot))
    return {name: what for name, what, wanted in needed if wanted and importlib.util.find_spec(name) is None}


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the records up to the first line that is incomplete or invalid."""
    values = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not isinstance(value, dict) or "step" not in value:
            break
        values.append(value)
    return values


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = [json.dumps(values) + "\n" for values in read_log(path) if values["step"] <= step]
    write_atomic(path, "".join(kept).encode())
