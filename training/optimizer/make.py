"""Builds a torch optimizer over flat shards."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tightwire.training.config.optimizer import OptimizerConfig


def make_optimizer(config: OptimizerConfig, param_groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Build the optimizer of ``config``. Only the group named ``matrices`` has weight decay.

    Raises:
        ValueError: the class does not have an option, or refuses its value.
    """
    cls = getattr(torch.optim, config.torch_name)
    known = set(inspect.signature(cls).parameters) - {"params", "lr", "weight_decay"}
    for option in config.options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(known))}"
            raise ValueError(f"optimizer.options: {config.torch_name} has no option {option!r}{hint}")
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in config.options.items()}
    groups = [
        {**group, "weight_decay": config.weight_decay if group["name"] == "matrices" else 0.0} for group in param_groups
    ]
    tried = torch.nn.Parameter(torch.zeros(1, device=param_groups[0]["params"][0].device))
    tried.grad = torch.zeros_like(tried)
    try:
        # Try a step on one element first: the class refuses some values only in a step.
        cls([{"params": [tried], "weight_decay": config.weight_decay}], lr=config.lr, **options).step()
        return cls(groups, lr=config.lr, **options)
    except (TypeError, ValueError, IndexError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"optimizer.options: {config.torch_name} refuses them: {error}") from None


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
