"""Computes the bytes of optimizer state and of checkpoints."""

from typing import NamedTuple

import torch

from tightwire.training.between.make import kept_bytes
from tightwire.training.config.between import BetweenOptions
from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.engine.units import UnitPlan, cut
from tightwire.training.estimate.live_bytes import LiveBytes
from tightwire.training.optimizer.make import make_optimizer

_FLOAT32_BYTES = 4
_TRIED = 256  # elements of a trial tensor


def optimizer_bytes(config: OptimizerConfig, num_elems: int) -> int:
    """Bytes of optimizer state for ``num_elems`` elements, measured on a small tensor."""
    return _try(config).kept * num_elems


def optimizer_moment_bytes(config: OptimizerConfig, num_elems: int) -> int:
    """Temporary bytes of an optimizer step that updates one tensor at a time; the largest has ``num_elems`` elements."""
    return _try(config).moment * num_elems


class _Tried(NamedTuple):
    """Bytes per element."""

    kept: int
    moment: int


def _try(config: OptimizerConfig) -> _Tried:
    # Two tensors: an optimizer may still hold the first one's temporaries while it updates the second.
    tried = [torch.nn.Parameter(torch.zeros(_TRIED)) for _ in range(2)]
    for parameter in tried:
        parameter.grad = torch.ones(_TRIED)
    optimizer = make_optimizer(config, [{"params": tried, "name": "matrices"}])
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    state = optimizer.state.get(tried[0], {}).values()
    flat = [value for value in state if isinstance(value, torch.Tensor) and value.numel() == _TRIED]
    return _Tried(sum(value.element_size() for value in flat), live.most // _TRIED)  # scalar state rounds to 0


def checkpoint_bytes(config: OptimizerConfig, plan: UnitPlan, between: BetweenOptions, num_replicas: int) -> int:
    """Bytes of one checkpoint in all ranks' files. With several replicas, each one stores its own residuals."""
    trainable_bytes = _FLOAT32_BYTES + optimizer_bytes(config, 1)
    shared = sum(flat.num_parameters * (trainable_bytes if flat.trainable else _FLOAT32_BYTES) for flat in plan.flats)
    if num_replicas == 1:
        return shared
    shards = [
        cut(flat, rank, plan.shard_ranks) for flat in plan.flats if flat.trainable for rank in range(plan.shard_ranks)
    ]
    return shared + num_replicas * sum(kept_bytes(between, shard) for shard in shards)
