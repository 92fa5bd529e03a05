"""What an arm's process should need beyond what it had: the engine's formula, the optimizer's state, the slot's, activations."""

from tightwire.comm.topology import Topology
from tightwire.model.config import LlamaConfig
from tightwire.training.between.make import kept_bytes
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.memory import engine_memory
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.units import UnitPlan, cut
from tightwire.training.estimate.activations import activation_bytes
from tightwire.training.estimate.footprint import optimizer_bytes


def arm_memory(
    config: TrainConfig, options: EngineOptions, llama: LlamaConfig, plan: UnitPlan, topology: Topology
) -> int:
    """Bytes of one rank at the most."""
    engine = engine_memory(plan, options, num_nodes=topology.num_nodes, ranks_per_node=topology.ranks_per_node)
    trainable = [flat for flat in plan.flats if flat.trainable]
    slot = config.parallel.between
    kept = 0
    if topology.world_size > plan.shard_ranks:
        kept = sum(kept_bytes(slot, cut(flat, 0, plan.shard_ranks)) for flat in trainable)
    activations = activation_bytes(
        llama,
        sequences=config.batch.micro_sequences,
        sequence_tokens=config.data.sequence_tokens,
        dtype=options.compute_dtype,
        checkpoint_every=options.checkpoint_every,
    )
    shard_elems = sum(flat.num_elems for flat in trainable) // plan.shard_ranks
    return sum(engine) + kept + activations + optimizer_bytes(config.optimizer, shard_elems)
