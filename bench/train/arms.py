"""Defines the arms of ``bench train``: shardings of the engine, and torch's data parallelism."""

from dataclasses import dataclass, field
from typing import Any, Literal

_ADAMW = {"name": "adamw", "lr": 1e-3}
_SGD = {"name": "sgd", "lr": 1e-2, "weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to train. ``parallel``: the section of a training configuration. ``peer``: the torch method to use instead.

    ``adds``: the order in which an exact arm sums gradients; None for an arm that compresses them.
    """

    name: str
    what: str
    parallel: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(_ADAMW))
    adds: Literal["ranks", "nodes", "other"] | None = "ranks"
    peer: Literal["ddp", "fsdp2"] | None = None


_ZERO_PP = {
    "sharding": "zero3",
    "gather_codec": "int8",
    "secondary": True,
    "reduce_path": "hierarchical",
    "reduce_codec": "int4",
    "reduce_across_codec": "int4",
}

ARMS = {
    arm.name: arm
    for arm in (
        Arm(name="none", what="whole copies, gradients summed once", parallel={"sharding": "none"}),
        Arm(name="zero1", what="optimizer cut over all ranks", parallel={"sharding": "zero1"}),
        Arm(name="zero2", what="gradients too", parallel={"sharding": "zero2"}),
        Arm(name="zero3", what="weights too, across nodes first and then inside", parallel={"sharding": "zero3"}),
        Arm(
            name="zero3-flat",
            what="zero3, every rank to every other",
            parallel={"sharding": "zero3", "gather_path": "flat"},
        ),
        Arm(
            name="zero3-by-node",
            what="zero3, gradients inside nodes first and then across",
            parallel={"sharding": "zero3", "reduce_path": "hierarchical"},
            adds="nodes",
        ),
        Arm(
            name="zero3-on-demand",
            what="zero3, weights asked for when they are needed",
            parallel={"sharding": "zero3", "prefetch": "implicit"},
        ),
        Arm(
            name="zero++",
            what="zero3, weights in int8 and kept on each node, gradients in int4",
            parallel=_ZERO_PP,
            adds=None,
        ),
        Arm(
            name="hybrid",
            what="cut inside nodes, float32 sums between them",
            parallel={"sharding": "hybrid"},
            adds="nodes",
        ),
        Arm(
            name="hybrid-quantized",
            what="hybrid, between nodes int4 sums and int8 results",
            parallel={"sharding": "hybrid", "between": {"kind": "quantized"}},
            adds=None,
        ),
        Arm(
            name="dgc",
            what="hybrid, a thousandth of the gradients between nodes; its own momentum, with SGD",
            parallel={"sharding": "hybrid", "between": {"kind": "dgc"}},
            optimizer=_SGD,
            adds=None,
        ),
        Arm(
            name="top-k",
            what="hybrid, a thousandth of the gradients between nodes, with AdamW",
            parallel={"sharding": "hybrid", "between": {"kind": "top-k"}},
            adds=None,
        ),
        Arm(name="ddp", what="torch DistributedDataParallel on gloo", adds="other", peer="ddp"),
        Arm(name="fsdp2", what="torch fully_shard on gloo, block by block", adds="other", peer="fsdp2"),
    )
}


def parse_arms(text: str) -> tuple[str, ...]:
    """
    Raises:
        ValueError: there is no such arm; the message lists all names.
    """
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in ARMS]:
        raise ValueError(f"--arms: there is no {', '.join(map(repr, unknown))}; choose of {', '.join(ARMS)}")
    return names
