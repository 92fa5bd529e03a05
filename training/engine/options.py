"""Options of the engine, checked at construction and against the number of nodes."""

from dataclasses import dataclass
from typing import Literal

import torch

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.training.config.sharding import SHARDINGS, Sharding

Path = Literal["flat", "hierarchical"]
_COMPUTE_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """
    compute_dtype: dtype of weights while computing; main shards are float32.
    reduce_dtype: dtype of gradients until they are summed; sums are float32.
    num_buffers: number of weight buffers that blocks share, unless sharding keeps whole weights.
    prefetch: ``explicit`` requests the weights of the next ``num_buffers`` blocks before computing one; ``implicit``
        requests weights when they are needed.
    gather_codec: codec of gathered weights (qwZ). Norms and biases are not encoded.
    gather_path: on several nodes, ``hierarchical`` gathers across nodes first, then inside.
    secondary: each node keeps its own copy of the blocks' weights until they change (hpZ).
    secondary_codec: codec of that copy; None keeps the bytes as received.
    secondary_blocks: number of blocks to keep, from the first; None: all.
    reduce_path: on several nodes, ``hierarchical`` sums inside nodes first (qgZ), ``flat`` sums in rank order.
    reduce_codec: codec of reduced gradients; with ``hierarchical``, inside nodes. Norms and biases are not encoded.
    reduce_across_codec: codec of gradients between nodes, with ``hierarchical``.
    checkpoint_every: recompute the activations of every k-th block in backward; 0: none, 1: all.
    """

    sharding: Sharding = SHARDINGS["zero3"]
    compute_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    num_buffers: int = 2
    prefetch: Literal["explicit", "implicit"] = "explicit"
    gather_codec: str = "none"
    gather_path: Path = "hierarchical"
    secondary: bool = False
    secondary_codec: str | None = None
    secondary_blocks: int | None = None
    reduce_path: Path = "flat"
    reduce_codec: str = "none"
    reduce_across_codec: str = "none"
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        for codec in self.codecs:
            parse_codec(codec)
        for field in ("compute_dtype", "reduce_dtype"):
            if getattr(self, field) not in _COMPUTE_DTYPES:
                raise ValueError(f"{field} must be float32 or bfloat16, got {getattr(self, field)}")
        if self.num_buffers < 1:
            raise ValueError(f"num_buffers must be at least 1, got {self.num_buffers}")
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every must be 0 (none), 1 (all) or more, got {self.checkpoint_every}")
        if self.secondary and (self.sharding.keep_weights or self.sharding.shard_over != "world"):
            raise ValueError(
                f"a node's copy of the weights (secondary) needs sharding zero3, got {self.sharding.name}: it keeps whole "
                "weights, or cuts them inside nodes only, anyway"
            )
        if self.sharding.shard_over == "self" and (self.gather_codec != "none" or self.reduce_codec != "none"):
            raise ValueError(
                f"with sharding {self.sharding.name} every rank has all of the weights, so nothing goes through gather_codec and "
                "reduce_codec; what sums over the ranks (between) has codecs of its own"
            )
        if self.sharding.shard_over != "world" and self.reduce_path == "hierarchical":
            raise ValueError(
                f"reduce_path hierarchical is for gradients cut over all ranks, got sharding {self.sharding.name}; between "
                "nodes it sums by a slot of its own (between)"
            )
        if not self.secondary and (self.secondary_codec is not None or self.secondary_blocks is not None):
            raise ValueError("secondary_codec and secondary_blocks are of the node's copy; set secondary too")
        if self.reduce_path == "flat" and self.reduce_across_codec != "none":
            raise ValueError(
                f"reduce_across_codec {self.reduce_across_codec} is of a leg between nodes, which reduce_path flat has not; "
                "set reduce_path hierarchical"
            )

    @property
    def codecs(self) -> list[str]:
        """Names of all codecs that may run."""
        secondary = [] if self.secondary_codec is None else [self.secondary_codec]
        return [self.gather_codec, self.reduce_codec, self.reduce_across_codec, *secondary]

    @property
    def parsed_codecs(self) -> list[Codec]:
        return [parse_codec(name) for name in dict.fromkeys(self.codecs) if name != "none"]

    def check_ranks(self, num_nodes: int) -> None:
        """Check the options against the number of nodes.

        Raises:
            ValueError: an option needs several nodes and ``num_nodes`` is 1.
        """
        if num_nodes > 1:
            return
        if self.secondary:
            raise ValueError("a node's copy of the weights (secondary) needs two nodes or more, got one")
        if self.reduce_path == "hierarchical" and self.reduce_across_codec != "none":
            raise ValueError(
                f"reduce_across_codec {self.reduce_across_codec} is of a leg between nodes, and there is one node; use "
                "reduce_codec, which on one node is the only leg's"
            )
