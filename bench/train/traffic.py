"""Computes the bytes that an arm sends in a step, from the formulas of the engine and the slot between replicas."""

from dataclasses import dataclass, replace

import torch

from tightwire.bench.train.predict import SlotBytes
from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.between.make import between_bytes
from tightwire.training.config.between import BetweenOptions, DenseOptions, TopKOptions
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.traffic import Flow, step_traffic
from tightwire.training.engine.units import UnitPlan, cut, plan_units
from tightwire.training.start.model import build_model

_CLIPPING_BYTES = 8  # a shard's squared norm, sent to each rank of its shard group


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The bytes of one rank; ``bytes_sent`` includes ``between_nodes``. With a sparse slot, ranks differ."""

    plan: UnitPlan
    flows: list[Flow]
    slots: dict[str, SlotBytes]
    clipping_bytes: int

    @property
    def bytes_sent(self) -> int:
        slots = sum(slot.inside + slot.between_nodes for slot in self.slots.values())
        return sum(flow.calls * flow.bytes_sent for flow in self.flows) + slots + self.clipping_bytes

    @property
    def between_nodes(self) -> int:
        """Bytes sent to other nodes, without clipping."""
        slots = sum(slot.between_nodes for slot in self.slots.values())
        return sum(flow.calls * flow.bytes_between_nodes for flow in self.flows) + slots

    def messages_between(self, num_nodes: int) -> int:
        """The number of messages to other nodes, without clipping."""
        flows = sum(flow.calls * flow.bytes_between_nodes // flow.payload_bytes for flow in self.flows)
        return flows + sum(slot.rounds * (num_nodes - 1) for slot in self.slots.values())


def arm_traffic(config: TrainConfig, options: EngineOptions, llama: LlamaConfig, topology: Topology) -> Traffic:
    """The traffic of ``topology``'s rank in a step after the first."""
    shard_ranks = options.sharding.shard_ranks(topology.world_size, topology.num_nodes)
    plan = plan_units(build_model(llama, device=torch.device("cpu")), shard_ranks)
    flows = step_traffic(
        plan, options, num_nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node, accumulation=1
    )
    return Traffic(
        plan=plan,
        flows=flows,
        slots=_slots(config.parallel.between, options, plan, topology),
        clipping_bytes=(shard_ranks - 1) * _CLIPPING_BYTES,
    )


def of_another_rank(traffic: Traffic, config: TrainConfig, options: EngineOptions, topology: Topology) -> Traffic:
    """The traffic of the same step on ``topology``'s rank."""
    return replace(traffic, slots=_slots(config.parallel.between, options, traffic.plan, topology))


def _slots(slot: BetweenOptions, options: EngineOptions, plan: UnitPlan, topology: Topology) -> dict[str, SlotBytes]:
    replicas = topology.world_size // plan.shard_ranks
    if replicas == 1:
        return {}
    # Replicas share a node only with sharding none, where every rank is a replica.
    is_whole = options.sharding.shard_over == "self"
    neighbours = topology.ranks_per_node - 1 if is_whole else 0
    shard, replica = (0, topology.rank) if is_whole else (topology.node_rank, topology.node)
    is_one_round = isinstance(slot, TopKOptions) or (isinstance(slot, DenseOptions) and replicas == 2)
    found = {}
    for flat in plan.flats:
        if flat.trainable:
            sent = between_bytes(slot, cut(flat, shard, plan.shard_ranks), rank=replica, world_size=replicas, step=0)
            inside = sent * neighbours // (replicas - 1)
            found[flat.name] = SlotBytes(inside, sent - inside, 1 if is_one_round else 2)
    return found
