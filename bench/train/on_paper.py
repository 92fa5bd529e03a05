"""Predicts step times on 8 to 1024 GPUs from stated assumptions, without measurements."""

from dataclasses import asdict, dataclass
from typing import Any

from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.models import arm_config
from tightwire.bench.train.predict import Computing, Rates, predict_step
from tightwire.bench.train.traffic import arm_traffic
from tightwire.comm.group.topology import Topology
from tightwire.model.open import open_checkpoint
from tightwire.training.engine.options import EngineOptions
from tightwire.training.estimate.arithmetic import flops_per_token
from tightwire.training.run.setup import engine_options


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Assumed values; none was measured. Codecs and memory traffic are assumed to take no time."""

    model: str = "random:llama-3-8b"
    gpus_per_node: int = 8
    flops_per_s: float = 400e12  # of one GPU's bfloat16 matrix products
    inside_bytes_per_s: float = 200e9  # from one GPU to the others of its node
    inside_round_s: float = 20e-6
    across_round_s: float = 50e-6
    gbits: tuple[int, ...] = (100, 400, 800)  # from one node to all others, fully used
    sequences: int = 1
    sequence_tokens: int = 2048


_ARMS = ("zero3-by-node", "zero++", "hybrid")
_GPUS = (8, 16, 64, 256, 1024)


def extrapolate(assumed: Assumptions | None = None) -> dict[str, Any]:
    """The assumptions, and a row for each number of GPUs, link and arm. ``step_s`` is a prediction.

    Cost: a few seconds, most of it for building modules without weights.
    """
    assumed = assumed or Assumptions()
    llama = open_checkpoint(assumed.model).config
    tokens = assumed.sequences * assumed.sequence_tokens
    third_s = flops_per_token(llama, assumed.sequence_tokens) * tokens / assumed.flops_per_s / 3
    computing = Computing(forward_s=third_s, backward_s=2 * third_s, rest_s=0.0)
    rows = []
    for gpus in _GPUS:
        nodes = max(2, gpus // assumed.gpus_per_node)
        topology = Topology(0, gpus, num_nodes=nodes)
        for name in _ARMS:
            config = arm_config(
                ARMS[name],
                model=assumed.model,
                dtype="bfloat16",
                world_size=gpus,
                sequences=assumed.sequences,
                sequence_tokens=assumed.sequence_tokens,
                timeout_s=60.0,
            )
            how: EngineOptions = engine_options(config)
            traffic = arm_traffic(config, how, llama, topology)
            for gbit in assumed.gbits:
                rates = Rates(
                    across_bytes_per_s=gbit / 8 * 1e9 / topology.ranks_per_node,
                    across_round_s=assumed.across_round_s,
                    inside_bytes_per_s=assumed.inside_bytes_per_s,
                    inside_round_s=assumed.inside_round_s,
                )
                step_s = predict_step(traffic.plan, how, traffic.flows, traffic.slots, computing, rates)
                rows.append(
                    {
                        "gpus": gpus,
                        "nodes": nodes,
                        "gbit": gbit,
                        "arm": name,
                        "node_bytes": traffic.between_nodes * topology.ranks_per_node,
                        "step_s": step_s,
                        "tokens_per_gpu_s": tokens / step_s,
                        "computing_share": sum(computing) / step_s,
                    }
                )
    return {"assumptions": asdict(assumed), "rows": rows}
