"""Makes a gradient compressor from its options; computes the bytes that it sends and keeps."""

from collections.abc import Callable
from typing import Any

from tightwire.training.compression.dense import (
    FLOAT32_BYTES,
    Replicas,
    dense_bytes,
    make_dense,
    make_quantized,
    quantized_bytes,
)
from tightwire.training.compression.sparse import SparseCompressor, clip_bytes, sparse_bytes
from tightwire.training.config.compression import CompressorOptions, DgcOptions, QuantizedOptions, SparseOptions
from tightwire.training.engine.compressor import GradientCompressor
from tightwire.training.engine.flat_parameters import ShardLayout

_MAKERS: dict[str, Callable[[Replicas, Any], GradientCompressor]] = {
    "dense": make_dense,
    "quantized": make_quantized,
    "top-k": SparseCompressor,
    "dgc": SparseCompressor,
}


def make_compressor(options: CompressorOptions, replicas: Replicas) -> GradientCompressor:
    """Make the compressor that ``options`` describe; all ranks of ``replicas.group`` pass the same options."""
    return _MAKERS[options.kind](replicas, options)


def compressor_bytes(options: CompressorOptions, shard: ShardLayout, *, rank: int, world_size: int, step: int) -> int:
    """Exact number of bytes that node ``rank`` of ``world_size`` sends for ``shard`` at ``step``."""
    if isinstance(options, SparseOptions):
        return sparse_bytes(rank, world_size, shard, options, step)
    if isinstance(options, QuantizedOptions):
        return quantized_bytes(rank, world_size, shard.num_elems, options)
    return dense_bytes(rank, world_size, shard.num_elems)


def inside_bytes(options: CompressorOptions, shard: ShardLayout, ranks_per_node: int) -> int:
    """Bytes that a rank sends inside its node for ``shard`` in a step: for clipping, over ``ranks_per_node`` ranks."""
    if isinstance(options, SparseOptions) and options.clip_norm is not None:
        return clip_bytes(ranks_per_node, len(shard.spans))
    return 0


def kept_bytes(options: CompressorOptions, shard: ShardLayout) -> int:
    """Bytes that a compressor keeps for ``shard`` from step to step, in memory and in a checkpoint."""
    num_flats = 2 if isinstance(options, DgcOptions) else 1 if isinstance(options, SparseOptions) else 0
    return num_flats * shard.num_elems * FLOAT32_BYTES
