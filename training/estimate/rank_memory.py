"""Computes the peak memory of one rank: what it holds for the whole run, plus the largest of four peaks in a step.

    backward         activations and their gradients, usually largest where backward begins
    reducing         the same from the first sum over ranks on, plus that sum's buffers
    last_sums        buffers of the largest unit's sum after backward
    optimizer_step   temporaries of the optimizer's step

Not included: the program, the kernels' own working memory, and freed memory that an allocator keeps.
"""

from typing import NamedTuple

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.between.make import kept_bytes
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.memory import engine_memory
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.transfers import transfer_bytes
from tightwire.training.engine.units import UnitPlan, cut
from tightwire.training.estimate.activations import activation_bytes
from tightwire.training.estimate.footprint import optimizer_bytes, optimizer_moment_bytes


class RankMemory(NamedTuple):
    """Bytes by purpose. ``stays``: held for the whole run. ``moments``: peaks that do not coincide."""

    stays: dict[str, int]
    moments: dict[str, int]

    @property
    def most(self) -> int:
        return sum(self.stays.values()) + max(self.moments.values())


def rank_memory(
    config: TrainConfig, options: EngineOptions, llama: LlamaConfig, plan: UnitPlan, topology: Topology
) -> RankMemory:
    """``plan``: the units of ``llama``, sharded for these ranks."""
    nodes = {"num_nodes": topology.num_nodes, "ranks_per_node": topology.ranks_per_node}
    trainable = [flat for flat in plan.flats if flat.trainable]
    shards = [flat.num_elems // plan.shard_ranks for flat in trainable]
    has_replicas = topology.world_size > plan.shard_ranks
    slot = config.parallel.between
    activations = activation_bytes(
        llama,
        options,
        sequences=config.batch.micro_sequences,
        sequence_tokens=config.data.sequence_tokens,
        frozen=tuple(config.model.frozen),
    )
    transfers = transfer_bytes(plan, options, **nodes)
    return RankMemory(
        stays={
            **engine_memory(plan, options, **nodes)._asdict(),
            "between": sum(kept_bytes(slot, cut(flat, 0, plan.shard_ranks)) for flat in trainable)
            if has_replicas
            else 0,
            "optimizer": optimizer_bytes(config.optimizer, sum(shards)),
        },
        moments={
            "backward": activations.most,
            "reducing": activations.reducing + transfers.beside_backward if transfers.beside_backward else 0,
            "last_sums": transfers.at_the_end,
            "optimizer_step": optimizer_moment_bytes(config.optimizer, max(shards)),
        },
    )
