"""Formulas for the temporary memory of one gradient reduction: messages and partial sums.

With N elements of g bytes, W ranks, L on each of K nodes, R in a shard group, and c(n) encoded bytes for n elements:

    flat, exact            g N (W-1)/W received, 4 N/W the sum
    flat, encoded          W c(N/W) sent, (W-1) c(N/W) received, 4 N/W the sum
    hierarchical, inside   exact: g N joined to messages; encoded: g N/L at a time, L c(N/L) sent
                           both: (L-1) c(N/L) received, 4 N/L the sum
    hierarchical, across   4 N/L that sum, K c(N/W) sent if encoded, (K-1) c(N/W) received, 4 N/W the sum
    between replicas       8 N/R of a shard, received and summed; a sparse slot takes about as much

Gathered weights need no temporary memory here. If ranks are threads of one process, messages are not copied.
"""

from typing import NamedTuple

from tightwire.comm.codec.codec import Codec
from tightwire.training.config.sharding import GroupShape
from tightwire.training.engine import gradients
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.units import Flat, Unit, UnitPlan

_FLOAT32_BYTES = 4


class Transfers(NamedTuple):
    """Bytes per rank, for the largest unit. ``beside_backward``: the largest of the units reduced during backward."""

    beside_backward: int
    at_the_end: int


def transfer_bytes(plan: UnitPlan, options: EngineOptions, *, num_nodes: int, ranks_per_node: int) -> Transfers:
    world_size = num_nodes * ranks_per_node
    shape = options.sharding.shard_group(num_nodes, ranks_per_node)
    beside = at_the_end = 0
    for unit in plan.units:
        if unit.trainable is None:
            continue
        most = 0 if shape.world_size == 1 else _reduce_bytes(unit, unit.trainable, options, shape)
        if shape.world_size < world_size:
            most = max(most, 2 * _FLOAT32_BYTES * unit.trainable.num_elems // shape.world_size)
        if gradients.alternates(options, unit):
            beside = max(beside, most)
        at_the_end = max(at_the_end, most)
    return Transfers(beside, at_the_end)


def _reduce_bytes(unit: Unit, flat: Flat, options: EngineOptions, shape: GroupShape) -> int:
    inside, across = gradients.reduce_codecs(options, unit)
    size, num_elems, ranks = options.reduce_dtype.itemsize, flat.num_elems, shape.world_size
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
