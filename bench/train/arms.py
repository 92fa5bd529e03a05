"""Defines the arms and the models of ``bench train``. An arm is a sharding of the engine, or torch's data parallelism."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tightwire.training.config.tree import ModelConfig
from tightwire.training.start.model import StartingModel, open_starting_model

_ADAMW = {"name": "adamw", "lr": 1e-3}
_SGD = {"name": "sgd", "lr": 1e-2, "weight_decay": 0.0}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train. ``parallel``: the section of a training configuration. ``peer``: the torch method to use instead.

    ``adds``: the order in which an exact arm sums gradients; None for an arm that compresses them.
    """

    name: str
    description: str
    parallel: dict[str, Any] = field(default_factory=dict)
    adds: Literal["ranks", "nodes", "other"] | None = "ranks"
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(_ADAMW))
    peer: Literal["ddp", "fsdp2"] | None = None


def _sharded(name: str, description: str, sharding: str, **parallel: Any) -> Arm:
    return Arm(name, description, {"sharding": sharding, **parallel})


def _hybrid(name: str, description: str, kind: str, optimizer: dict[str, Any] = _ADAMW) -> Arm:
    adds = "nodes" if kind == "dense" else None
    return Arm(name, description, {"sharding": "hybrid", "between": {"kind": kind}}, adds, optimizer)


_ZERO_PP = {
    "sharding": "zero3",
    "gather_codec": "int8",
    "secondary": True,
    "reduce_path": "hierarchical",
    "reduce_codec": "int4",
    "reduce_across_codec": "int4",
}
_BY_NODE = {"sharding": "zero3", "reduce_path": "hierarchical"}
ARMS = {
    arm.name: arm
    for arm in (
        _sharded("none", "every rank holds everything, gradients summed once a step", "none"),
        _sharded("zero1", "optimizer state sharded over all ranks", "zero1"),
        _sharded("zero2", "zero1, gradients sharded too", "zero2"),
        _sharded("zero3", "zero2, weights sharded too, gathered between nodes first and then inside", "zero3"),
        _sharded("zero3-flat", "zero3, weights gathered from every rank directly", "zero3", gather_path="flat"),
        Arm("zero3-by-node", "zero3, gradients summed inside nodes first and then between nodes", _BY_NODE, "nodes"),
        _sharded("zero3-on-demand", "zero3, weights gathered when they are needed", "zero3", prefetch="implicit"),
        Arm("zero++", "zero3, weights in int8 and kept on each node, gradients in int4", _ZERO_PP, None),
        _hybrid("hybrid", "sharded inside nodes, float32 sums between them", "dense"),
        _hybrid("hybrid-quantized", "hybrid, between nodes int4 sums and int8 results", "quantized"),
        _hybrid("dgc", "hybrid, a thousandth of the gradients between nodes; SGD with DGC's momentum", "dgc", _SGD),
        _hybrid("top-k", "hybrid, a thousandth of the gradients between nodes, with AdamW", "top-k"),
        Arm("ddp", "torch DistributedDataParallel on gloo", adds="other", peer="ddp"),
        Arm("fsdp2", "torch fully_shard on gloo, block by block", adds="other", peer="fsdp2"),
    )
}

# The name is the approximate number of parameters; embeddings are tied.
TINY = "tiny"
MODELS: dict[str, dict[str, int]] = {
    TINY: {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192},
    "10m": {"hidden_size": 256, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 896},
    "30m": {"hidden_size": 448, "num_hidden_layers": 10, "num_attention_heads": 7, "intermediate_size": 1536},
    "60m": {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 1792},
}
_VOCABULARY = {"vocab_size": 4096}


def model_values(model: str) -> dict[str, Any]:
    """The ``model`` section of a configuration."""
    return {"shape": {**MODELS[model], **_VOCABULARY}} if model in MODELS else {"start": model}


def open_model(model: str, seed: int) -> StartingModel:
    """
    Raises:
        ModelError: there is no such model.
    """
    return open_starting_model(
        ModelConfig.model_validate(model_values(model)), seed=seed, keep_in=Path(), texts=lambda: ()
    )
