"""Computes the learning rate of each step: linear warm-up, then constant, linear or cosine decay to a final share."""

import math
from collections.abc import Callable

from tightwire.training.config.tree import ScheduleConfig

# Maps progress after the warm-up, 0 to 1, to the remaining share of the total decay.
_REMAINING: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(schedule: ScheduleConfig, height: float, step: int) -> float:
    """The rate of ``step``, counted from 0.

    The first step of an N-step warm-up has ``height`` / N, the last step of the run the final rate.
    """
    if step < schedule.warmup_steps:
        return height * (step + 1) / schedule.warmup_steps
    steps_left = schedule.steps - 1 - schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / steps_left) if steps_left > 0 else 0.0
    remaining = _REMAINING[schedule.kind](progress)
    return height * (schedule.final_share + (1.0 - schedule.final_share) * remaining)
