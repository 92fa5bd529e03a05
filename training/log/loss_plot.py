"""Plots the loss of each step, its running mean and the held-out loss, as SVG and PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        axes.plot(*zip(*held_out, strict=True), "o-", color="#e6550d", markersize=4, label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
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
