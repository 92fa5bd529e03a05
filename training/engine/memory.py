"""Computes the memory that the engine allocates and that a gradient reduction takes, in bytes per rank.

The engine's own memory is that of the buffers that its ``make_`` functions make on the meta device. One reduction of N elements
of g bytes over W ranks, L on each of K nodes, R in a shard group, with c(n) encoded bytes for n elements, takes messages and
partial sums:

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

from tightwire.comm.codec.codec import Codec
from tightwire.training.config.sharding import GroupShape
from tightwire.training.engine import gathered_weights, gradients
from tightwire.training.engine.flat_parameters import Bucket, BucketPlan, FlatParameter
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.shards import make_shards

_FLOAT32_BYTES = 4
_META = torch.device("meta")


def engine_memory(plan: BucketPlan, options: EngineOptions, *, num_nodes: int, ranks_per_node: int) -> dict[str, int]:
    """Bytes by purpose."""
    shape = options.sharding.shard_group(num_nodes, ranks_per_node)
    shards = make_shards(plan, options, shape, _META)
    weight_pools = {place.pool for place in gathered_weights.make_buffers(plan, options, shards, _META) if place.pool}
    places = gradients.make_buffers(plan, options, _META).values()
    return {
        "main_shards": sum(shard.main.nbytes for shard in shards.main.values()),
        "encoded_shards": sum(shard.encoded.nbytes for shard in shards.main.values() if shard.encoded is not None),
        "frozen_shards": sum(shard.encoded.nbytes for shard in shards.frozen.values()),
        "gradient_shards": sum(place.grad_S.nbytes for place in places if not place.in_place),
        "weight_buffers": sum(buffer.memory.nbytes for pool in weight_pools for buffer in pool.buffers),
        "gradient_buffers": sum(
            buffer.memory.nbytes for pool in {place.pool for place in places} for buffer in pool.buffers
        ),
        "node_copy": sum(gathered_weights.node_copy_bytes(shards).values()),
        "gather_room": gathered_weights.room_bytes(shards) + gathered_weights.blocks_bytes(shards),
    }


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
