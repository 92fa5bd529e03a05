"""Clips each parameter's gradient to a norm when the ranks of a node hold pieces of the parameter."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.collectives.collectives import all_gather
from tightwire.comm.group.group import Group

_NORM_BYTES = 8
_TINY = 1e-6  # same as torch.nn.utils.clip_grad_norm_


def local_norm(clip_norm: float, num_nodes: int) -> float:
    """The norm to which each of N nodes clips its own mean gradient: the global norm times N^1/2.

    Equation 8 of the DGC article uses N^-1/2, because its local gradients are already divided by N.
    """
    return clip_norm * math.sqrt(num_nodes)


def clip_pieces(pieces: Sequence[Tensor], max_norm: float, inside: Group | None) -> None:
    """Scale each parameter in place to a norm of at most ``max_norm``; ``pieces`` has one per parameter.

    All ranks of ``inside`` call with pieces of the same parameters in the same order; a piece may be empty. The norm is
    over all of them. A NaN norm makes the piece NaN. Cost: ``clip_bytes`` inside a node, one round.
    """
    squares = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64).square() for piece in pieces])
    if inside is not None and inside.world_size > 1:
        squares = torch.stack(all_gather(inside, squares)).sum(0)
    factors = (max_norm / (squares.sqrt() + _TINY)).clamp(max=1.0).float()
    for piece, factor in zip(pieces, factors, strict=True):
        piece.mul_(factor)


def clip_bytes(ranks_per_node: int, num_parameters: int) -> int:
    return (ranks_per_node - 1) * num_parameters * _NORM_BYTES
