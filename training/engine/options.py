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
    """The ``parallel`` section of a configuration, whose field descriptions apply here, with dtypes.

    ``compute_dtype``: of weights while computing; main shards are float32. ``reduce_dtype``: of gradients until they are
    summed; sums are float32. Norms and biases are never encoded.
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
                f"a node's copy of the weights (secondary) needs sharding zero3, got {self.sharding.name}, which does not "
                "gather weights across nodes in forward and backward"
            )
        if self.sharding.shard_over == "self" and (self.gather_codec != "none" or self.reduce_codec != "none"):
            raise ValueError(
                f"with sharding {self.sharding.name} every rank has all weights, so gather_codec and reduce_codec are not "
                "used; parallel.between has its own codecs"
            )
        if self.sharding.shard_over != "world" and self.reduce_path == "hierarchical":
            raise ValueError(
                f"reduce_path hierarchical needs gradients sharded over all ranks, got sharding {self.sharding.name}, which "
                "sums between nodes as parallel.between says"
            )
        if not self.secondary and (self.secondary_codec is not None or self.secondary_blocks is not None):
            raise ValueError("secondary_codec and secondary_blocks need secondary: true")
        if self.reduce_path == "flat" and self.reduce_across_codec != "none":
            raise ValueError(f"reduce_across_codec {self.reduce_across_codec} needs reduce_path hierarchical, got flat")

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
            raise ValueError("a node's copy of the weights (secondary) needs at least two nodes, got one")
        if self.reduce_path == "hierarchical" and self.reduce_across_codec != "none":
            raise ValueError(
                f"reduce_across_codec {self.reduce_across_codec} needs at least two nodes; use reduce_codec on one node"
            )
