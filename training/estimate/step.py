"""The bytes, operations, memory and predicted seconds of one training step on one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.compression.make import compressor_bytes, inside_bytes
from tightwire.training.config.compression import DenseOptions, SparseOptions
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.flat_parameters import BucketPlan, cut_shard, plan_buckets
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.traffic import Flow, step_traffic
from tightwire.training.estimate.arithmetic import flops_per_token
from tightwire.training.estimate.memory import RankMemory, rank_memory
from tightwire.training.start.model import build_model

_NORM_BYTES = 8  # a shard's squared gradient norm, sent to each rank of its shard group


class CompressorBytes(NamedTuple):
    """Bytes and rounds of the gradient compressor for one flat parameter."""

    inside: int
    between_nodes: int
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """One step after the first. Bytes are those that ``topology``'s rank sends; ranks differ with a sparse compressor."""

    config: TrainConfig
    options: EngineOptions
    llama: LlamaConfig
    topology: Topology
    step: int
    plan: BucketPlan
    flows: Sequence[Flow]
    compressors: Mapping[str, CompressorBytes]

    @property
    def between_nodes(self) -> int:
        """Bytes to other nodes."""
        flows = sum(flow.calls * flow.bytes_between_nodes for flow in self.flows)
        return flows + sum(each.between_nodes for each in self.compressors.values())

    @property
    def inside_nodes(self) -> int:
        """Bytes to ranks of the same node."""
        flows = sum(flow.calls * (flow.bytes_sent - flow.bytes_between_nodes) for flow in self.flows)
        return flows + sum(each.inside for each in self.compressors.values())

    @property
    def bytes_sent(self) -> int:
        """All bytes, with those of the gradients' norm, which the other properties leave out."""
        return self.inside_nodes + self.between_nodes + (self.plan.shard_ranks - 1) * _NORM_BYTES

    @property
    def messages_between_nodes(self) -> int:
        flows = sum(flow.calls * flow.bytes_between_nodes // flow.payload_bytes for flow in self.flows)
        return flows + sum(each.rounds * (self.topology.num_nodes - 1) for each in self.compressors.values())

    @property
    def flops(self) -> float:
        """Operations of one rank."""
        tokens = self.config.batch.sequences * self.config.data.sequence_tokens / self.topology.world_size
        return flops_per_token(self.llama, self.config.data.sequence_tokens) * tokens

    def memory(self) -> RankMemory:
        """Cost: runs the model once on the meta device, a few milliseconds per block."""
        return rank_memory(self.config, self.options, self.llama, self.plan, self.topology)

    def on_rank(self, rank: int) -> "StepModel":
        """The same step on another rank."""
        topology = replace(self.topology, rank=rank)
        return replace(
            self, topology=topology, compressors=_compressors(self.config, self.options, self.plan, topology, self.step)
        )


def model_step(
    config: TrainConfig, options: EngineOptions, llama: LlamaConfig, topology: Topology, *, step: int = 0
) -> StepModel:
    """``step``: its number, for compressors whose sparsity rises."""
    shard_ranks = options.sharding.shard_ranks(topology.world_size, topology.num_nodes)
    plan = plan_buckets(build_model(llama, device=torch.device("cpu"), frozen=config.model.frozen), shard_ranks)
    flows = step_traffic(
        plan,
        options,
        num_nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        accumulation=config.batch.accumulation(topology.world_size),
    )
    return StepModel(
        config=config,
        options=options,
        llama=llama,
        topology=topology,
        step=step,
        plan=plan,
        flows=flows,
        compressors=_compressors(config, options, plan, topology, step),
    )


def _compressors(
    config: TrainConfig, options: EngineOptions, plan: BucketPlan, topology: Topology, step: int
) -> dict[str, CompressorBytes]:
    replicas = topology.world_size // plan.shard_ranks
    if replicas == 1:
        return {}
    compressor = config.parallel.between
    # Replicas share a node only with sharding none, where every rank is a replica.
    is_whole = options.sharding.shard_over == "self"
    neighbours = topology.ranks_per_node - 1 if is_whole else 0
    shard_rank, replica = (0, topology.rank) if is_whole else (topology.node_rank, topology.node)
    is_one_round = isinstance(compressor, SparseOptions) or (isinstance(compressor, DenseOptions) and replicas == 2)
    found = {}
    for flat_param in plan.flat_params:
        if flat_param.trainable:
            shard = cut_shard(flat_param, shard_rank, plan.shard_ranks)
            sent = compressor_bytes(compressor, shard, rank=replica, world_size=replicas, step=step)
            to_neighbours = sent * neighbours // (replicas - 1)
            found[flat_param.name] = CompressorBytes(
                inside=to_neighbours + inside_bytes(compressor, shard, plan.shard_ranks),
                between_nodes=sent - to_neighbours,
                rounds=1 if is_one_round else 2,
            )
    return found
