"""Formulas for the memory that the engine allocates and that a gradient reduction takes, in bytes per rank.

With N elements in all buckets, B in the largest block, R ranks in a shard group, L ranks on a node, d and g the bytes of
compute_dtype and reduce_dtype:

    main_shards        4 N/R, float32
    wire_shards        N/R encoded, unless that is the main shard itself (float32, no codec)
    gradient_shards    4 N/R of trainable buckets, unless that is the buffer itself (R = 1, float32, reduced once a step)
    weight_buffers     num_buffers d B, if blocks share buffers
    kept_weights       d N of buckets with their own buffer, unless that is the main shard itself (R = 1, float32)
    gradient_buffers   2 g B, if blocks share buffers
    kept_gradients     g N of trainable buckets with their own buffer
    secondary          N/L encoded, of the blocks that nodes keep
    gather_room        the largest bucket once encoded, if weights are encoded or gathered across nodes in two legs

One reduction of N elements of g bytes over W ranks, L on each of K nodes, R in a shard group, with c(n) encoded bytes for n
elements, takes messages and partial sums:

    flat, exact            g N (W-1)/W received, 4 N/W the sum
    flat, encoded          W c(N/W) sent, (W-1) c(N/W) received, 4 N/W the sum
    hierarchical, inside   exact: g N joined to messages; encoded: g N/L at a time, L c(N/L) sent
                           both: (L-1) c(N/L) received, 4 N/L the sum
    hierarchical, across   4 N/L that sum, K c(N/W) sent if encoded, (K-1) c(N/W) received, 4 N/W the sum
    between replicas       8 N/R of a shard, received and summed; a sparse compressor takes about as much

Gathered weights need no temporary memory. If ranks are threads of one process, messages are not copied. Optimizer state and
activations are not included.
"""

from typing import NamedTuple

import torch

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.training.config.sharding import GroupShape
from tightwire.training.engine import gradients, weights
from tightwire.training.engine.flat_parameters import Bucket, BucketPlan, FlatParameter
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.shards import kept_buckets, secondary_bytes, shard_wire_bytes

_FLOAT32_BYTES = 4


class Memory(NamedTuple):
    """Bytes per rank."""

    main_shards: int
    wire_shards: int
    gradient_shards: int
    weight_buffers: int
    kept_weights: int
    gradient_buffers: int
    kept_gradients: int
    secondary: int
    gather_room: int


def engine_memory(plan: BucketPlan, options: EngineOptions, *, num_nodes: int, ranks_per_node: int) -> Memory:
    ranks = options.sharding.shard_group(num_nodes, ranks_per_node)
    world, compute, reduce = ranks.world_size, options.compute_dtype.itemsize, options.reduce_dtype.itemsize
    trainable = [(bucket, bucket.trainable) for bucket in plan.buckets if bucket.trainable is not None]
    blocks = [(bucket, flat_param) for bucket, flat_param in trainable if gradients.alternates(options, bucket)]
    alternating = [bucket for bucket in plan.buckets if weights.alternates(options, bucket)]
    wires = {
        flat_param.name: shard_wire_bytes(
            flat_param, world, weights.gather_codec(options, bucket, world), options.compute_dtype
        )
        for bucket in plan.buckets
        for flat_param in bucket.flat_params
    }
    return Memory(
        main_shards=sum(_FLOAT32_BYTES * flat_param.num_elems // world for flat_param in plan.flat_params),
        wire_shards=sum(
            wires[flat_param.name]
            for bucket in plan.buckets
            for flat_param in bucket.flat_params
            if not (weights.gather_codec(options, bucket, world).exact and options.compute_dtype == torch.float32)
        ),
        gradient_shards=sum(
            _FLOAT32_BYTES * flat_param.num_elems // world
            for bucket, flat_param in trainable
            if not gradients.is_in_buffer(options, bucket, world)
        ),
        weight_buffers=options.num_buffers * compute * max(map(weights.weight_elems, alternating), default=0),
        kept_weights=sum(
            compute * weights.weight_elems(bucket)
            for bucket in plan.buckets
            if bucket not in alternating and not weights.is_in_shard(options, bucket, world)
        ),
        gradient_buffers=gradients.NUM_BUFFERS
        * reduce
        * max((flat_param.num_elems for _, flat_param in blocks), default=0),
        kept_gradients=sum(
            reduce * flat_param.num_elems for bucket, flat_param in trainable if (bucket, flat_param) not in blocks
        ),
        secondary=_secondary_bytes(plan, options, ranks, wires),
        gather_room=weights.room_bytes(plan, options, ranks),
    )


def _secondary_bytes(plan: BucketPlan, options: EngineOptions, ranks: GroupShape, wires: dict[str, int]) -> int:
    codec = None if options.secondary_codec is None else parse_codec(options.secondary_codec)
    kept = [flat_param for bucket in kept_buckets(options, plan.blocks) for flat_param in bucket.flat_params]
    return sum(
        secondary_bytes(flat_param, *ranks, wires[flat_param.name], codec, options.compute_dtype) for flat_param in kept
    )


class Transfers(NamedTuple):
    """Bytes per rank, for the largest bucket. ``beside_backward``: the largest of the buckets reduced during backward."""

    beside_backward: int
    at_the_end: int


def transfer_bytes(plan: BucketPlan, options: EngineOptions, *, num_nodes: int, ranks_per_node: int) -> Transfers:
    world_size = num_nodes * ranks_per_node
    shape = options.sharding.shard_group(num_nodes, ranks_per_node)
    beside = at_the_end = 0
    for bucket in plan.buckets:
        if bucket.trainable is None:
            continue
        most = 0 if shape.world_size == 1 else _reduce_bytes(bucket, bucket.trainable, options, shape)
        if shape.world_size < world_size:
            most = max(most, 2 * _FLOAT32_BYTES * bucket.trainable.num_elems // shape.world_size)
        if gradients.alternates(options, bucket):
            beside = max(beside, most)
        at_the_end = max(at_the_end, most)
    return Transfers(beside, at_the_end)


def _reduce_bytes(bucket: Bucket, flat_param: FlatParameter, options: EngineOptions, shape: GroupShape) -> int:
    inside, across = gradients.reduce_codecs(options, bucket)
    size, num_elems, ranks = options.reduce_dtype.itemsize, flat_param.num_elems, shape.world_size
    own_sum = _FLOAT32_BYTES * num_elems // ranks
    if shape.num_nodes == 1 or options.reduce_path == "flat":
        return _messages(inside, num_elems // ranks, size, ranks) + own_sum
    per_node = shape.per_node
    node_sum = _FLOAT32_BYTES * num_elems // per_node
    across_nodes = node_sum + _messages(across, num_elems // ranks, size, shape.num_nodes) + own_sum
    if per_node == 1:
        return across_nodes
    joined = size * num_elems if inside.exact else size * num_elems // per_node
    return max(across_nodes, joined + _messages(inside, num_elems // per_node, size, per_node) + node_sum)


def _messages(codec: Codec, num_elems: int, elem_bytes: int, ranks: int) -> int:
    """Bytes received from the others, plus bytes encoded for all ranks; exact slices are sent without a copy."""
    one = codec.wire_bytes(num_elems, elem_bytes)
    return (ranks - 1) * one + (0 if codec.exact else ranks * one)
