"""The run's log: one JSON line for each step and evaluation, the same in TensorBoard if wished, and the loss as a plot.

A run that goes on from a checkpoint first drops the lines after it, so the file reads as if nothing had happened.
"""

import importlib.util
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tightwire.comm.atomic_file import write_atomic
from tightwire.training.config.tree import LogConfig
from tightwire.training.log.loss_plot import plot_losses
from tightwire.training.log.records import EvaluationRecord, StepRecord

LOG = "metrics.jsonl"
_TENSORBOARD = "tensorboard"
_SCALARS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "memory_bytes",
    "wire_bytes",
    "exposed_ms",
    "held_out_loss",
)


class RunLog:
    """Written by one rank. ``after_step``: of the checkpoint that the run goes on from, 0 for a new run."""

    def __init__(self, run: Path, *, after_step: int, tensorboard: bool) -> None:
        """
        Raises:
            ValueError: there cannot be a log in the folder.
        """
        self._path = run / LOG
        try:
            _drop_after(self._path, after_step)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ValueError(f"run: the log {self._path} cannot be written: {error}") from None
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a second to import, where it is not wished

            self._writer = SummaryWriter(run / _TENSORBOARD, purge_step=after_step + 1)

    def add(self, record: StepRecord | EvaluationRecord) -> None:
        """
        Raises:
            OSError: of the disk; the line is kept, and written with a later one if there is room again.
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
        """Draw what there is so far; None when there is nothing yet."""
        return plot_losses(read_log(self._path), self._path.parent)

    def close(self) -> None:
        with suppress(OSError):  # of lines that `add` has failed with, and what the run ends with is not to be hidden
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def check_packages(config: LogConfig) -> None:
    """
    Raises:
        ValueError: what the log is to have needs a package that is not installed.
    """
    for option, package in (("tensorboard", "tensorboard"), ("plot", "matplotlib")):
        if getattr(config, option) and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"log.{option} needs the package {package}, which is not installed: pip install 'tightwire[train]', or set "
                f"log.{option}=false"
            )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines, up to one that was cut off or is none of a log."""
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
