"""Builds a torch optimizer over shards of flat parameters and computes the learning rate of each step."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tightwire.option import suggest
from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.config.tree import ScheduleConfig


def make_optimizer(config: OptimizerConfig, param_groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Build the optimizer; only the group ``matrices`` has weight decay. ValueError: an unknown option or bad value."""
    cls = getattr(torch.optim, config.torch_name)
    known = {name: each.default for name, each in inspect.signature(cls).parameters.items()}
    for option, value in config.options.items():
        if option not in known:
            raise ValueError(f"optimizer.options: {config.torch_name} has no option {option!r}{suggest(option, known)}")
        if isinstance(known[option], bool) and value not in (True, False):
            raise ValueError(f"optimizer.options: {option} must be true or false, got {value!r}")
    # Torch's own choice on CUDA holds temporaries of all shards at once.
    options: dict[str, Any] = {} if config.options.keys() & {"foreach", "fused"} else {"foreach": False}
    options |= {name: tuple(value) if isinstance(value, list) else value for name, value in config.options.items()}
    groups = [{**group, "weight_decay": config.weight_decay * (group["name"] == "matrices")} for group in param_groups]
    try:
        optimizer = cls(groups, lr=config.lr, **options)
        names_of_state(optimizer)  # the class refuses some values only in a step
        return optimizer
    except (TypeError, ValueError, LookupError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"optimizer: {cls.__name__} refuses lr={config.lr:g}, {config.options}: {error}") from None


def names_of_state(optimizer: Optimizer) -> set[str]:
    """The names of what the optimizer keeps of a parameter, found by a step of an equal one on one element."""
    cls, group = type(optimizer), optimizer.param_groups[0]
    tried = torch.nn.Parameter(torch.zeros(1, device=group["params"][0].device))
    tried.grad = torch.zeros_like(tried)
    given = {name: group[name] for name in set(inspect.signature(cls).parameters) - {"params"} if name in group}
    trial = cls([tried], **given)
    trial.step()
    return {name for name, value in trial.state[tried].items() if value is not None}


def learning_rate(schedule: ScheduleConfig, height: float, step: int) -> float:
    """The rate of ``step``, from 0: ``height`` / N in the first of N warm-up steps, the final rate in the last of two or more behind them."""
    if step < schedule.warmup_steps:
        return height * (step + 1) / schedule.warmup_steps
    steps_left = schedule.steps - 1 - schedule.warmup_steps
    progress = min(1.0, (step - schedule.warmup_steps) / steps_left) if steps_left > 0 else 0.0
    remaining = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return height * (schedule.final_share + (1.0 - schedule.final_share) * remaining[schedule.kind])
