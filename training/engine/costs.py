"""Costs of the engine on a rank: the memory that it allocates, that of a gradient reduction, the bytes that a step sends.

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

``step_traffic`` has the bytes that training sends: every collective of an optimizer step. With M the bytes of an encoded
bucket and W = K L ranks on K nodes, per rank and call:

    all_gather       (W-1) M/W     of which between nodes (W-L) M/W
    gather_across    (K-1) M/W     all between nodes
    gather_inside    (L-1) K M/W   none
    reduce_scatter   (W-1) M/W     of which between nodes (W-L) M/W
      hierarchical   (L-1) M'/L + (K-1) M"/W, the second term between nodes; M' and M" are M in each leg's codec

All ranks send the same number. For the gradient compressor see ``compression.compressors.compressor_bytes``.
"""

from collections.abc import Iterator
from heapq import nlargest
from typing import NamedTuple

import torch

from tightwire.comm.codec.codec import Codec
from tightwire.comm.collectives.gather_shards import gather_across_bytes, gather_inside_bytes, gather_shards_bytes
from tightwire.comm.collectives.qgz import hierarchical_bytes
from tightwire.comm.collectives.reduce_scatter import reduce_scatter_bytes
from tightwire.training.config.sharding import GroupShape
from tightwire.training.engine import gathered_weights, gradients
from tightwire.training.engine.flat_parameters import EMBEDDING, FLOAT32_BYTES, Bucket, BucketPlan, FlatParameter
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.shards import form_of, make_shards

_META = torch.device("meta")


def engine_memory(plan: BucketPlan, options: EngineOptions, *, num_nodes: int, ranks_per_node: int) -> dict[str, int]:
    """The bytes that the engine allocates on a rank, by purpose."""
    shape = options.sharding.shard_group(num_nodes, ranks_per_node)
    shards = make_shards(plan, options, shape, _META)
    of_weights = gathered_weights.make_buffers(plan, options, shards, _META)
    of_gradients = gradients.make_buffers(plan, options, _META).values()
    weight_pools = {buffer.pool for buffer in of_weights if buffer.pool}
    gradient_pools = {buffer.pool for buffer in of_gradients}
    return {
        "main_shards": sum(shard.main.nbytes for shard in shards.main.values()),
        "encoded_shards": sum(shard.encoded.nbytes for shard in shards.main.values() if shard.encoded is not None),
        "frozen_shards": sum(shard.encoded.nbytes for shard in shards.frozen.values()),
        "gradient_shards": sum(each.grad_S.nbytes for each in of_gradients if not each.in_place),
        "weight_buffers": sum(buffer.memory.nbytes for pool in weight_pools for buffer in pool.buffers),
        "gradient_buffers": sum(buffer.memory.nbytes for pool in gradient_pools for buffer in pool.buffers),
        "node_copy": sum(gathered_weights.node_copy_bytes(shards).values()),
        "gather_room": gathered_weights.room_bytes(shards) + gathered_weights.blocks_bytes(shards),
    }


class Transfers(NamedTuple):
    """Bytes per rank, for the largest buckets that are reduced at once. ``beside_backward``: of those reduced during backward."""

    beside_backward: int
    at_the_end: int


def transfer_bytes(plan: BucketPlan, options: EngineOptions, *, num_nodes: int, ranks_per_node: int) -> Transfers:
    """The memory of reductions, by the formulas above."""
    world_size = num_nodes * ranks_per_node
    shape = options.sharding.shard_group(num_nodes, ranks_per_node)
    at_once, beside, at_the_end = gradients.num_reduce_lanes(options, num_nodes), list[int](), list[int]()
    for bucket in plan.buckets:
        if bucket.trainable is None:
            continue
        most = 0 if shape.world_size == 1 else _reduce_bytes(bucket, bucket.trainable, options, shape)
        if shape.world_size < world_size:
            most = max(most, 2 * FLOAT32_BYTES * bucket.trainable.num_elems // shape.world_size)
        if gradients.shares_gradient_buffer(options, bucket):
            beside.append(most)
        at_the_end.append(most)
    return Transfers(*(sum(nlargest(at_once, each)) for each in (beside, at_the_end)))


def _reduce_bytes(bucket: Bucket, flat_param: FlatParameter, options: EngineOptions, shape: GroupShape) -> int:
    inside, across = gradients.reduce_codecs(options, bucket)
    size, num_elems, ranks = options.reduce_dtype.itemsize, flat_param.num_elems, shape.world_size
    own_sum = FLOAT32_BYTES * num_elems // ranks
    if shape.num_nodes == 1 or options.reduce_path == "flat":
        return _messages(inside, num_elems // ranks, size, ranks) + own_sum
    per_node = shape.per_node
    node_sum = FLOAT32_BYTES * num_elems // per_node
    across_nodes = node_sum + _messages(across, num_elems // ranks, size, shape.num_nodes) + own_sum
    if per_node == 1:
        return across_nodes
    joined = size * num_elems if inside.exact else size * num_elems // per_node
    return max(across_nodes, joined + _messages(inside, num_elems // per_node, size, per_node) + node_sum)


def _messages(codec: Codec, num_elems: int, elem_bytes: int, ranks: int) -> int:
    """Bytes received from the others, plus bytes encoded for all ranks; exact slices are sent without a copy."""
    one = codec.wire_bytes(num_elems, elem_bytes)
    return (ranks - 1) * one + (0 if codec.exact else ranks * one)


class Flow(NamedTuple):
    """One kind of collective in an optimizer step; bytes are per call and rank. ``lane``: gather or reduce."""

    lane: str
    op: str
    flat_param: str
    calls: int
    payload_bytes: int  # one rank's encoded input of a gather, or encoded slice of a reduce
    bytes_sent: int
    bytes_between_nodes: int


def step_traffic(
    plan: BucketPlan,
    options: EngineOptions,
    *,
    num_nodes: int,
    ranks_per_node: int,
    accumulation: int,
    first: bool = False,
    forwards: int = 1,
) -> list[Flow]:
    """The collectives of one step of ``accumulation`` micro-batches, in plan order.

    ``first``: it is the first step, which also gathers frozen weights with their own buffer. ``forwards``: of a micro-batch; only
    the last one has a backward.
    """
    ranks = options.sharding.shard_group(num_nodes, ranks_per_node)
    if ranks.world_size == 1:
        return []
    flows = []
    for bucket in plan.buckets:
        flows += _gathers(plan, options, bucket, ranks, accumulation, first, forwards)
        if bucket.trainable is not None:
            flows.append(_reduce(plan, options, bucket, ranks, accumulation))
    return flows


def first_backward_block(plan: BucketPlan) -> int:
    """The first bucket of blocks that needs a backward; the blocks before it and the embedding are frozen."""
    if any(bucket.name == EMBEDDING and bucket.trainable for bucket in plan.buckets):
        return 0
    for number, block in enumerate(plan.block_modules):
        if any(use.flat_param.trainable and f"{use.module}.".startswith(f"{block}.") for use in plan.uses):
            return number // plan.per_bucket
    return len(plan.blocks)


def gathers_per_step(block: int, num_blocks: int, num_buffers: int, first_backward: int, accumulation: int) -> int:
    """How often block ``block`` is gathered in a step if blocks share ``num_buffers`` weight buffers.

    Once per forward and backward, except that backward finds the last blocks still gathered, and the next forward the first
    ones. If everything is trained, B blocks and A micro-batches take 2 A (B - buffers) + buffers gathers, buffers <= B.
    """
    stays_till_forward = first_backward <= block < num_buffers
    comes_for_backward = first_backward <= block < num_blocks - num_buffers
    return 1 + (accumulation - 1) * (not stays_till_forward) + accumulation * comes_for_backward


def _gathers(
    plan: BucketPlan,
    options: EngineOptions,
    bucket: Bucket,
    ranks: GroupShape,
    accumulation: int,
    first: bool,
    forwards: int,
) -> Iterator[Flow]:
    for flat_param in bucket.flat_params:
        once = 1 if flat_param.trainable or first else 0
        calls = once
        if gathered_weights.shares_weight_buffer(options, bucket):
            of_block = options.num_buffers, first_backward_block(plan), accumulation
            calls = (
                accumulation if bucket.block is None else gathers_per_step(bucket.block, len(plan.blocks), *of_block)
            )
            calls += (forwards - 1) * accumulation
        form = form_of(options, bucket, flat_param, ranks)
        wire, (num_nodes, per_node) = form.wire_bytes, form.ranks
        if not form.two_legs:
            sent, between = gather_shards_bytes(num_nodes * per_node, wire), (num_nodes - 1) * per_node * wire
            yield Flow("gather", "all_gather", flat_param.name, calls, wire, sent, between)
            continue
        num_across = once if form.copied else calls
        across, inside = gather_across_bytes(num_nodes, wire), gather_inside_bytes(num_nodes, per_node, wire)
        yield Flow("gather", "gather_across", flat_param.name, num_across, wire, across, across)
        yield Flow("gather", "gather_inside", flat_param.name, calls, num_nodes * wire, inside, 0)


def _reduce(plan: BucketPlan, options: EngineOptions, bucket: Bucket, ranks: GroupShape, accumulation: int) -> Flow:
    flat_param = bucket.trainable
    assert flat_param is not None
    calls, size = 1, options.reduce_dtype.itemsize
    if gradients.shares_gradient_buffer(options, bucket):
        calls = accumulation if bucket.block is None or bucket.block >= first_backward_block(plan) else 0
    inside_codec, across_codec = gradients.reduce_codecs(options, bucket)
    slice_elems = flat_param.num_elems // ranks.world_size
    if ranks.num_nodes == 1 or options.reduce_path == "flat":
        payload = inside_codec.wire_bytes(slice_elems, size)
        sent = reduce_scatter_bytes(0, ranks.world_size, flat_param.num_elems, size, inside_codec)
        between = (ranks.num_nodes - 1) * ranks.per_node * payload
    else:
        payload = across_codec.wire_bytes(slice_elems, size)
        inside, between = hierarchical_bytes(0, *ranks, flat_param.num_elems, size, inside_codec, across_codec)
        sent = inside + between
    return Flow("reduce", "reduce_scatter", flat_param.name, calls, payload, sent, between)
