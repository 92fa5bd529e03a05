"""Makes a between-node slot from its options; computes the bytes it sends and keeps."""

from collections.abc import Callable
from typing import Any

from tightwire.training.between.dense import FLOAT32_BYTES, DenseBetween, dense_bytes
from tightwire.training.between.dgc import DgcBetween
from tightwire.training.between.local_clip import clip_bytes
from tightwire.training.between.quantized import QuantizedBetween, codecs_of, quantized_bytes
from tightwire.training.between.replicas import Replicas
from tightwire.training.between.sparse import sparse_bytes
from tightwire.training.between.top_k import TopKBetween
from tightwire.training.config.between import (
    BetweenOptions,
    DenseOptions,
    DgcOptions,
    QuantizedOptions,
    SparseOptions,
    TopKOptions,
)
from tightwire.training.engine.between import Between
from tightwire.training.engine.units import UnitShard

_SLOTS: dict[type[BetweenOptions], Callable[[Replicas, Any], Between]] = {
    DenseOptions: DenseBetween,
    QuantizedOptions: QuantizedBetween,
    TopKOptions: TopKBetween,
    DgcOptions: DgcBetween,
}


def make_between(options: BetweenOptions, replicas: Replicas) -> Between:
    """Make the slot that ``options`` describe; all ranks of ``replicas.group`` pass the same options."""
    return _SLOTS[type(options)](replicas, options)


def check_options(options: BetweenOptions) -> None:
    """Check what the configuration cannot, because it does not import torch.

    Raises:
        ValueError: a codec does not exist.
    """
    if isinstance(options, QuantizedOptions):
        codecs_of(options)


def between_bytes(options: BetweenOptions, shard: UnitShard, *, rank: int, world_size: int, step: int) -> int:
    """``Between.wire_bytes`` without a group: bytes that node ``rank`` of ``world_size`` sends for ``shard``."""
    if isinstance(options, SparseOptions):
        return sparse_bytes(rank, world_size, shard, options, step)
    if isinstance(options, QuantizedOptions):
        return quantized_bytes(rank, world_size, shard.num_elems, options)
    return dense_bytes(rank, world_size, shard.num_elems)


def inside_bytes(options: BetweenOptions, shard: UnitShard, ranks_per_node: int) -> int:
    """Bytes that a rank sends inside its node for ``shard`` in a step: for clipping, over ``ranks_per_node`` ranks."""
    if isinstance(options, SparseOptions) and options.clip_norm is not None:
        return clip_bytes(ranks_per_node, len(shard.pieces))
    return 0


def kept_bytes(options: BetweenOptions, shard: UnitShard) -> int:
    """Bytes that a slot keeps for ``shard`` from step to step, in memory and in a checkpoint."""
    num_flats = 2 if isinstance(options, DgcOptions) else 1 if isinstance(options, TopKOptions) else 0
    return num_flats * shard.num_elems * FLOAT32_BYTES
