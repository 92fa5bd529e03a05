"""Makes a gradient compressor from its options; computes the bytes that it sends and keeps."""

from tightwire.comm.all_reduce.flash import FlashAllReduce, flash_bytes
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.training.compression.dense import (
    FLOAT32_BYTES,
    AllReduceCompressor,
    Replicas,
    dense_bytes,
    exact_all_reduce,
)
from tightwire.training.compression.sparse import SparseCompressor, clip_bytes, sparse_bytes
from tightwire.training.config.compression import CompressorOptions, DgcOptions, QuantizedOptions, SparseOptions
from tightwire.training.engine.flat_parameters import ShardLayout
from tightwire.training.engine.gradients import GradientCompressor


def make_compressor(options: CompressorOptions, replicas: Replicas) -> GradientCompressor:
    """Make the compressor that ``options`` describe; all ranks of ``replicas.group`` pass the same options."""
    if isinstance(options, SparseOptions):
        return SparseCompressor(replicas, options)
    if isinstance(options, QuantizedOptions):
        # qgZ (ZeRO++, arXiv 2306.10209) stops after the reduce-scatter, because with ``zero3`` one rank updates each slice. Here
        # every node updates its own copy, so the sums are gathered again, with a second rounding; all decode the same bytes.
        name = f"quantized:{options.reduce_codec},{options.gather_codec}"
        return AllReduceCompressor(FlashAllReduce(replicas.group, *_codecs(options), name=name))
    return AllReduceCompressor(exact_all_reduce(replicas.group))


def compressor_bytes(options: CompressorOptions, shard: ShardLayout, *, rank: int, world_size: int, step: int) -> int:
    """Exact number of bytes that node ``rank`` of ``world_size`` sends for ``shard`` at ``step``."""
    if isinstance(options, SparseOptions):
        return sparse_bytes(rank, world_size, shard, options, step)
    if isinstance(options, QuantizedOptions):
        return flash_bytes(rank, world_size, shard.num_elems, FLOAT32_BYTES, *_codecs(options))
    return dense_bytes(rank, world_size, shard.num_elems)


def _codecs(options: QuantizedOptions) -> tuple[Codec, Codec]:
    return parse_codec(options.reduce_codec), parse_codec(options.gather_codec)


def inside_bytes(options: CompressorOptions, shard: ShardLayout, ranks_per_node: int) -> int:
    """Bytes that a rank sends inside its node for ``shard`` in a step: for clipping, over ``ranks_per_node`` ranks."""
    if isinstance(options, SparseOptions) and options.clip_norm is not None:
        return clip_bytes(ranks_per_node, len(shard.spans))
    return 0


def kept_bytes(options: CompressorOptions, shard: ShardLayout) -> int:
    """Bytes that a compressor keeps for ``shard`` from step to step, in memory and in a checkpoint."""
    num_flats = 2 if isinstance(options, DgcOptions) else 1 if isinstance(options, SparseOptions) else 0
    return num_flats * shard.num_elems * FLOAT32_BYTES
