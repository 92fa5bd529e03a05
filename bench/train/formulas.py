"""Computes bytes and memory of the engine's arms from formulas, before any arm runs."""

from dataclasses import dataclass

from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.traffic import Traffic, arm_traffic, of_another_rank
from tightwire.bench.train.trainee import config_of_arm
from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.engine.options import EngineOptions
from tightwire.training.estimate.rank_memory import rank_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Formulas:
    """The formulas of one arm. ``traffics``: by rank."""

    options: EngineOptions
    traffics: tuple[Traffic, ...]
    ranks_per_node: int
    memory_bytes: int

    @property
    def node_bytes(self) -> int:
        """Bytes per step that leave the node that sends most."""
        between = [traffic.between_nodes for traffic in self.traffics]
        per_node = self.ranks_per_node
        return max(sum(between[first : first + per_node]) for first in range(0, len(between), per_node))

    @property
    def busiest(self) -> Traffic:
        """The traffic of the rank that sends most to other nodes; the others wait for it."""
        return max(self.traffics, key=lambda traffic: traffic.between_nodes)


def formulas_of(options: TrainBenchOptions, llama: LlamaConfig) -> dict[str, Formulas]:
    """
    Raises:
        ValueError: an arm does not fit these ranks; the message names it.
    """
    first, *others = (Topology(rank, options.world_size, num_nodes=options.nodes) for rank in range(options.world_size))
    found = {}
    for name in options.arms:
        if ARMS[name].peer:
            continue
        config, how = config_of_arm(options, ARMS[name])
        traffic = arm_traffic(config, how, llama, first)
        found[name] = Formulas(
            options=how,
            traffics=(traffic, *(of_another_rank(traffic, config, how, other) for other in others)),
            ranks_per_node=options.ranks_per_node,
            memory_bytes=rank_memory(config, how, llama, traffic.plan, first).most,
        )
    return found
