"""Formulas for the memory that the engine allocates, in bytes per rank and by purpose.

With N elements in all units, B in the largest block, R ranks in a shard group, L ranks on a node, d and g the bytes of
compute_dtype and reduce_dtype:

    main_shards        4 N/R, float32
    wire_shards        N/R encoded, unless that is the main shard itself (float32, no codec)
    gradient_shards    4 N/R of trainable units, unless that is the buffer itself (R = 1, float32, reduced once a step)
    weight_buffers     num_buffers d B, if blocks share buffers
    kept_weights       d N of units with their own buffer, unless that is the main shard itself (R = 1, float32)
    gradient_buffers   2 g B, if blocks share buffers
    kept_gradients     g N of trainable units with their own buffer
    secondary          N/L encoded, of the blocks that nodes keep
    gather_room        the largest unit once encoded, if weights are encoded or gathered across nodes in two legs

``training.engine.transfers`` has the temporary memory of reductions. Optimizer state and activations are not included.
"""

from typing import NamedTuple

import torch

from tightwire.comm.codec.codec import parse_codec
from tightwire.training.config.sharding import GroupShape
from tightwire.training.engine import gradients, weights
from tightwire.training.engine.main_shard import shard_wire_bytes
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.secondary import kept_units, secondary_bytes
from tightwire.training.engine.units import UnitPlan

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


def engine_memory(plan: UnitPlan, options: EngineOptions, *, num_nodes: int, ranks_per_node: int) -> Memory:
    ranks = options.sharding.shard_group(num_nodes, ranks_per_node)
    world, compute, reduce = ranks.world_size, options.compute_dtype.itemsize, options.reduce_dtype.itemsize
    trainable = [(unit, unit.trainable) for unit in plan.units if unit.trainable is not None]
    blocks = [(unit, flat) for unit, flat in trainable if gradients.alternates(options, unit)]
    alternating = [unit for unit in plan.units if weights.alternates(options, unit)]
    wires = {
        flat.name: shard_wire_bytes(flat, world, weights.gather_codec(options, unit, world), options.compute_dtype)
        for unit in plan.units
        for flat in unit.flats
    }
    return Memory(
        main_shards=sum(_FLOAT32_BYTES * flat.num_elems // world for flat in plan.flats),
        wire_shards=sum(
            wires[flat.name]
            for unit in plan.units
            for flat in unit.flats
            if not (weights.gather_codec(options, unit, world).exact and options.compute_dtype == torch.float32)
        ),
        gradient_shards=sum(
            _FLOAT32_BYTES * flat.num_elems // world
            for unit, flat in trainable
            if not gradients.lies_in_buffer(options, unit, world)
        ),
        weight_buffers=options.num_buffers * compute * max(map(weights.weight_elems, alternating), default=0),
        kept_weights=sum(
            compute * weights.weight_elems(unit)
            for unit in plan.units
            if unit not in alternating and not weights.lies_in_shard(options, unit, world)
        ),
        gradient_buffers=gradients.NUM_BUFFERS * reduce * max((flat.num_elems for _, flat in blocks), default=0),
        kept_gradients=sum(reduce * flat.num_elems for unit, flat in trainable if (unit, flat) not in blocks),
        secondary=_secondary_bytes(plan, options, ranks, wires),
        gather_room=weights.room_bytes(plan, options, ranks),
    )


def _secondary_bytes(plan: UnitPlan, options: EngineOptions, ranks: GroupShape, wires: dict[str, int]) -> int:
    codec = None if options.secondary_codec is None else parse_codec(options.secondary_codec)
    kept = [flat for unit in kept_units(options, plan.blocks) for flat in unit.flats]
    return sum(secondary_bytes(flat, *ranks, wires[flat.name], codec, options.compute_dtype) for flat in kept)
