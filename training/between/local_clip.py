"""Clipping each parameter's gradient to a norm, where the parameter lies in pieces on the ranks of a node."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.collectives.collectives import all_gather
from tightwire.comm.group.group import Group

_NORM_BYTES = 8
_TINY = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def local_norm(clip_norm: float, num_nodes: int) -> float:
    """The norm to which each of ``num_nodes`` nodes clips its own mean gradient: N^1/2 of the global one's.

    The article's equation 8 has N^-1/2, because its local gradients are divided by N already.
    """
    return clip_norm * math.sqrt(num_nodes)


def clip_pieces(pieces: Sequence[Tensor], max_norm: float, inside: Group | None) -> None:
    """Scale each parameter, whose pieces on this rank are ``pieces``, down to ``max_norm`` at most.

    All ranks of ``inside`` call with pieces of the same parameters in the same order, maybe empty ones; the sum of
    squares goes over them. Cost: ``clip_bytes``, inside a node, one round. A norm that is no number shows in the numbers.
    """
    squares = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64).square() for piece in pieces])
    if inside is not None and inside.world_size > 1:
        squares = torch.stack(all_gather(inside, squares)).sum(0)
    factors = (max_norm / (squares.sqrt() + _TINY)).clamp(max=1.0).float()
    for piece, factor in zip(pieces, factors, strict=True):
        piece.mul_(factor)


def clip_bytes(ranks_per_node: int, num_parameters: int) -> int:
    return (ranks_per_node - 1) * num_parameters * _NORM_BYTES
