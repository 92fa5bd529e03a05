"""Options of the engine: the ``parallel`` section of a configuration with torch's dtypes and parsed codecs."""

from dataclasses import dataclass
from typing import Literal

import torch

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.training.config.sharding import SHARDINGS, Sharding
from tightwire.training.config.tree import PACKED, Prefetch, TrainConfig
from tightwire.training.engine.flat_parameters import ENDS, Bucket

Legs = Literal["flat", "hierarchical"]  # over all ranks at once, or a leg inside nodes and one across them
# Fields whose values in the configuration have another type.
_CONVERTED = ("sharding", "compute_dtype", "reduce_dtype", "checkpoint_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How the engine shards, gathers and reduces: ``training.config.tree.ParallelConfig``, which describes and checks the fields.

    ``compute_dtype``: of weights while computing; main shards are float32. ``reduce_dtype``: of gradients until they are
    summed; sums are float32. Norms and biases are never encoded. Raises ValueError: a codec does not exist.
    """

    sharding: Sharding = SHARDINGS["zero3"]
    compute_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    num_buffers: int = 2
    reshard_ends: bool = False
    prefetch: Prefetch = "explicit"
    gather_codec: str = "none"
    frozen_codec: str | None = None
    gather_path: Legs = "hierarchical"
    secondary: bool = False
    reduce_path: Legs = "flat"
    reduce_codec: str = "none"
    reduce_across_codec: str = "none"
    checkpoint_blocks: int = 0

    def __post_init__(self) -> None:
        _ = self.codecs

    def ahead(self, computed: Literal["forward", "backward"]) -> int:
        """How many blocks are requested before one is computed in this pass."""
        return self.num_buffers if self.prefetch in ("explicit", computed) else 0

    def may_share(self, bucket: Bucket) -> bool:
        """Whether the bucket may share buffers with others: blocks do, and with ``reshard_ends`` embedding and head."""
        return bucket.block is not None or (self.reshard_ends and bucket.name in ENDS)

    @property
    def codecs(self) -> list[Codec]:
        """All codecs that may run, each once."""
        kept = {self.frozen_codec} - {PACKED}
        names = dict.fromkeys([self.gather_codec, *kept, self.reduce_codec, self.reduce_across_codec])
        return [parse_codec(name) for name in names if name and name != "none"]


def engine_options(config: TrainConfig) -> EngineOptions:
    names = [name for name in EngineOptions.__dataclass_fields__ if name not in _CONVERTED]
    blocks = config.parallel.checkpoint_blocks
    return EngineOptions(
        sharding=SHARDINGS[config.parallel.sharding],
        compute_dtype=getattr(torch, config.model.compute_dtype),
        reduce_dtype=getattr(torch, config.parallel.reduce_dtype),
        checkpoint_blocks=blocks if isinstance(blocks, int) else {"all": 1 << 30, "auto": 0}[blocks],
        **{name: getattr(config.parallel, name) for name in names},
    )
