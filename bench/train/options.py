"""Defines the arms, models and options of ``bench train``. An arm is a sharding of the engine, or torch's data parallelism."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from tightwire.bench.options import OutputOptions, known_model
from tightwire.comm.link.link import parse_link
from tightwire.option import MAX_SECONDS, option, require

_ADAMW = {"name": "adamw", "lr": 1e-3}
_SGD = {"name": "sgd", "lr": 1e-2, "weight_decay": 0.0}


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to train. ``parallel``: a configuration's section, or torch's ``peer``. ``is_exact``: no compression."""

    parallel: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(_ADAMW))
    peer: Literal["ddp", "fsdp2"] | None = None


def _sharded(sharding: str, **parallel: Any) -> Arm:
    return Arm({"sharding": sharding, **parallel})


def _hybrid(kind: str, optimizer: dict[str, Any] = _ADAMW) -> Arm:
    """Sharded inside nodes, with sums of ``kind`` between nodes."""
    return Arm({"sharding": "hybrid", "between": {"kind": kind}}, kind == "dense", optimizer)


_ZERO_PP = {
    "sharding": "zero3",
    "gather_codec": "int8",
    "secondary": True,
    "reduce_path": "hierarchical",
    "reduce_codec": "int4",
    "reduce_across_codec": "int4",
}
ARMS = {
    # zero3: weights are gathered between nodes first, gradients summed over all ranks at once
    **{name: _sharded(name) for name in ("none", "zero1", "zero2", "zero3")},
    "zero3-flat": _sharded("zero3", gather_path="flat"),
    "zero3-by-node": _sharded("zero3", reduce_path="hierarchical"),
    "zero3-on-demand": _sharded("zero3", prefetch="implicit"),
    **{f"zero3-ahead-{pass_}": _sharded("zero3", prefetch=pass_) for pass_ in ("forward", "backward")},
    "zero3-1-buffer": _sharded("zero3", num_buffers=1),
    "zero3-4-buffers": _sharded("zero3", num_buffers=4),
    "zero3-2-blocks": _sharded("zero3", blocks_per_bucket=2),
    "zero3-reshard-ends": _sharded("zero3", reshard_ends=True),  # of an untied model
    "zero++": Arm(_ZERO_PP, is_exact=False),
    "hybrid": _hybrid("dense"),
    "hybrid-quantized": _hybrid("quantized"),
    "dgc": _hybrid("dgc", _SGD),
    "top-k": _hybrid("top-k"),
    "ddp": Arm(peer="ddp"),
    "fsdp2": Arm(peer="fsdp2"),
}

# The name is the approximate number of parameters.
TINY = "tiny"
MODELS: dict[str, dict[str, int]] = {
    TINY: {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192},
    "10m": {"hidden_size": 256, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 896},
    "30m": {"hidden_size": 448, "num_hidden_layers": 10, "num_attention_heads": 7, "intermediate_size": 1536},
    "12m-untied": {"hidden_size": 256, "num_hidden_layers": 10, "num_attention_heads": 8, "intermediate_size": 896},
    "60m": {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 1792},
}
_UNTIED = (TINY, "12m-untied")
_VOCABULARY = {"vocab_size": 4096}


def model_values(model: str) -> dict[str, Any]:
    """The ``model`` section of a training configuration."""
    tied = {"tie_word_embeddings": model not in _UNTIED}
    return {"shape": {**MODELS[model], **_VOCABULARY, **tied}} if model in MODELS else {"start": model}


def _model(name: str) -> str:
    try:
        return name if name in MODELS else known_model(name)
    except ValueError as error:
        raise ValueError(f"none of {', '.join(MODELS)}, and {error}") from None


def _rates(text: str) -> tuple[str, ...]:
    for link in (links := tuple(text.split(","))):
        if parse_link(link).bytes_per_s is None:
            raise ValueError(f"{link} limits no rate; write one such as 200mbit")
    return links


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions(OutputOptions):
    description: ClassVar[str] = (
        "Time training steps of a Llama with random weights between emulated nodes, beside torch's data parallelism: bytes, "
        "exposed communication, memory and losses, and a prediction of each time. Needs root for the links."
    )
    model: str = option("10m", f"{', '.join(MODELS)} parameters, or as serve: random:path/config.json", parse=_model)
    nodes: int = option(2, "emulated nodes", least=2)
    ranks_per_node: int = option(2, "processes of each node, one thread each", least=1)
    links: tuple[str, ...] = option(
        ("50mbit", "200mbit", "1gbit"),
        "links between the nodes, emulated one after the other; needs root",
        metavar="RATE,RATE",
        unique=True,
        parse=_rates,
    )
    arms: tuple[str, ...] = option(
        ("zero3", "zero++", "hybrid", "dgc", "top-k", "ddp", "fsdp2"),
        f"ways to train: {', '.join(ARMS)}",
        unique=True,
    )
    sequences: tuple[int, ...] = option((4,), "sequences of each rank in a step, in turn", unique=True, least=1)
    sequence_tokens: int = option(128, "tokens of a sequence", least=2)
    dtype: str = option("float32", "of weights and activations in a step", choices=("float32", "bfloat16"))
    steps: int = option(1, "steps of an arm in each round", least=1)
    repeats: int = option(3, "rounds, in each of which all arms take turns", least=1)
    seed: int = option(0, "of weights, tokens and the order of arms")
    timeout_s: float = option(120.0, "seconds to wait for a rank", flag="--timeout", above=0, most=MAX_SECONDS)

    def __post_init__(self) -> None:
        require(set(self.arms) <= set(ARMS), "arms", self.arms, f"among {', '.join(ARMS)}")
        if self.dtype != "float32" and any(ARMS[name].peer == "ddp" for name in self.arms):
            raise ValueError(f"--dtype {self.dtype}: ddp computes in float32 only; leave it out of --arms")
        require(self.world_size <= 64, "nodes", self.nodes, f"64 / --ranks-per-node {self.ranks_per_node} or less")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node
