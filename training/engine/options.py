"""The options of the engine: one frozen value, checked when it is made and against the ranks."""

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
    compute_dtype: of weights while computing; main shards are float32.
    reduce_dtype: of gradients until they are summed; sums are float32.
    num_buffers: blocks alternate over so many weight buffers, where weights are not kept whole.
    prefetch: ``explicit`` asks for the next blocks' weights before computing one, so that as many as there are buffers are
        there or on their way; ``implicit`` when they are needed.
    gather_codec: of weights on the wire (qwZ). Norms and biases travel as they are.
    gather_path: over several nodes, ``hierarchical`` goes across nodes first and then inside.
    secondary: each node keeps a copy of its own of the blocks' weights until they change (hpZ).
    secondary_codec: of that copy; None: as it came.
    secondary_blocks: so many first blocks are kept; None: all.
    reduce_path: over several nodes, ``hierarchical`` sums inside nodes first (qgZ), ``flat`` in rank order at once.
    reduce_codec: of gradients on the wire; on a hierarchical path, inside nodes. Norms and biases travel as they are.
    reduce_across_codec: of gradients between nodes, on a hierarchical path.
    checkpoint_every: recompute every k-th block's activations in backward; 0: of none, 1: of all.
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
        """Names of all codecs that may run: what ``comm.collectives.prepare_codecs`` is to be given."""
        secondary = [] if self.secondary_codec is None else [self.secondary_codec]
        return [self.gather_codec, self.reduce_codec, self.reduce_across_codec, *secondary]

    @property
    def parsed_codecs(self) -> list[Codec]:
        return [parse_codec(name) for name in dict.fromkeys(self.codecs) if name != "none"]

    def check_ranks(self, num_nodes: int) -> None:
        """
        Raises:
            ValueError: the options mean nothing on ``num_nodes`` nodes.
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
