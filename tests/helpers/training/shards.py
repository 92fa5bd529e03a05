"""Flats of made-up parameters, to be cut as the product cuts its own."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tightwire.training.engine.flat_parameters import ALIGN_ELEMS, FlatParameter, ParamSpan, ShardLayout


def make_flat(shapes: Mapping[str, tuple[int, ...]], multiple: int = ALIGN_ELEMS) -> FlatParameter:
    """A flat parameter of trainable parameters, padded to a multiple of ``multiple``."""
    params, end = [], 0
    for name, shape in shapes.items():
        params.append(ParamSpan(name, shape, end, math.prod(shape)))
        end += -(-math.prod(shape) // ALIGN_ELEMS) * ALIGN_ELEMS
    return FlatParameter("block", tuple(params), -(-end // multiple) * multiple, trainable=True)


def fill(shard: ShardLayout, values: Mapping[str, Tensor]) -> Tensor:
    """(N,) what a shard has of each parameter's ``values``, zeros between them."""
    flat_N = torch.zeros(shard.num_elems)
    for span in shard.spans:
        flat_N[span.place] = values[span.param.name].flatten()[span.offset : span.offset + span.num_elems]
    return flat_N
