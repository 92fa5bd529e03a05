"""Computes the peak memory of one rank and the bytes of optimizer state and checkpoints.

A rank's peak is what it holds for the whole run, plus the largest of four peaks in a step:

    backward         activations and their gradients, usually largest where backward begins
    reducing         the same from the first sum over ranks on, plus that sum's buffers
    last_sums        buffers of the largest bucket's sum after backward
    optimizer_step   temporaries of the optimizer's step

Not included: the program, the kernels' own working memory, and freed memory that an allocator keeps.
"""

from typing import NamedTuple

import torch

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.compression.make import kept_bytes
from tightwire.training.config.compression import CompressorOptions
from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.flat_parameters import BucketPlan, cut_shard
from tightwire.training.engine.memory import engine_memory, transfer_bytes
from tightwire.training.engine.options import EngineOptions
from tightwire.training.estimate.activations import LiveBytes, activation_bytes
from tightwire.training.optimizer import make_optimizer

_FLOAT32_BYTES = 4
_TRIED = 256  # elements of a trial tensor


class OptimizerBytes(NamedTuple):
    """Bytes per element: of optimizer state, and of the temporary tensors of a step that updates one tensor at a time."""

    kept: int
    moment: int


def measure_optimizer(config: OptimizerConfig) -> OptimizerBytes:
    """Step on small tensors."""
    # Two tensors: an optimizer may still hold the first one's temporaries while it updates the second.
    tried = [torch.nn.Parameter(torch.zeros(_TRIED)) for _ in range(2)]
    for parameter in tried:
        parameter.grad = torch.ones(_TRIED)
    optimizer = make_optimizer(config, [{"params": tried, "name": "matrices"}])
    optimizer.step()
    with LiveBytes() as live:
        optimizer.step()
    state = optimizer.state.get(tried[0], {}).values()
    flat_param = [value for value in state if isinstance(value, torch.Tensor) and value.numel() == _TRIED]
    # Scalar state rounds to 0.
    return OptimizerBytes(sum(value.element_size() for value in flat_param), live.most // _TRIED)


def checkpoint_bytes(config: OptimizerConfig, plan: BucketPlan, between: CompressorOptions, num_replicas: int) -> int:
    """Bytes of one checkpoint, which has no frozen weights, in all ranks' files. With several replicas, each one stores its own residuals."""
    trainable = [flat_param for flat_param in plan.flat_params if flat_param.trainable]
    element_bytes = _FLOAT32_BYTES + measure_optimizer(config).kept
    shared = element_bytes * sum(flat_param.num_parameters for flat_param in trainable)
    if num_replicas == 1:
        return shared
    ranks = range(plan.shard_ranks)
    shards = [cut_shard(flat_param, rank, plan.shard_ranks) for flat_param in trainable for rank in ranks]
    return shared + num_replicas * sum(kept_bytes(between, shard) for shard in shards)


class RankMemory(NamedTuple):
    """Bytes by purpose. ``stays``: held for the whole run. ``moments``: peaks that do not coincide."""

    stays: dict[str, int]
    moments: dict[str, int]

    @property
    def most(self) -> int:
        return sum(self.stays.values()) + max(self.moments.values())


def rank_memory(
    config: TrainConfig, options: EngineOptions, llama: LlamaConfig, plan: BucketPlan, topology: Topology
) -> RankMemory:
    """``plan``: the buckets of ``llama``, sharded for these ranks."""
    nodes = {"num_nodes": topology.num_nodes, "ranks_per_node": topology.ranks_per_node}
    trainable = [flat_param for flat_param in plan.flat_params if flat_param.trainable]
    shards = [flat_param.num_elems // plan.shard_ranks for flat_param in trainable]
    has_replicas = topology.world_size > plan.shard_ranks
    between, optimizer = config.parallel.between, measure_optimizer(config.optimizer)
    accumulates = config.batch.accumulation(topology.world_size) > 1
    activations = activation_bytes(llama, options, config, accumulates=accumulates)
    transfers = transfer_bytes(plan, options, **nodes)
    return RankMemory(
        stays={
            **engine_memory(plan, options, **nodes),
            "between": sum(kept_bytes(between, cut_shard(flat_param, 0, plan.shard_ranks)) for flat_param in trainable)
            if has_replicas
            else 0,
            "optimizer": optimizer.kept * sum(shards),
        },
        moments={
            "backward": activations.most,
            "reducing": activations.reducing + transfers.beside_backward if transfers.beside_backward else 0,
            "last_sums": transfers.at_the_end,
            "optimizer_step": optimizer.moment * max(shards),
        },
    )
