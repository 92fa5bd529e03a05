"""Flats of made-up parameters, to be cut as the product cuts its own."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tightwire.training.engine.units import ALIGN_ELEMS, Flat, Part, UnitShard


def make_flat(shapes: Mapping[str, tuple[int, ...]], multiple: int = ALIGN_ELEMS) -> Flat:
    """Trainable parameters one after the other, aligned as a unit's are; as long as a multiple of ``multiple``."""
    parts, end = [], 0
    for name, shape in shapes.items():
        parts.append(Part(name, shape, end, math.prod(shape)))
        end += -(-math.prod(shape) // ALIGN_ELEMS) * ALIGN_ELEMS
    return Flat("block", tuple(parts), -(-end // multiple) * multiple, trainable=True)


def fill(shard: UnitShard, values: Mapping[str, Tensor]) -> Tensor:
    """(N,) what a shard has of each parameter's ``values``, zeros between them."""
    flat_N = torch.zeros(shard.num_elems)
    for piece in shard.pieces:
        flat_N[piece.place] = values[piece.parameter].flatten()[piece.offset : piece.offset + piece.num_elems]
    return flat_N
