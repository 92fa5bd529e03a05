"""The parts of parameters that a rank saves, in the same form for every sharding."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tightwire.training.engine.engine import Engine
from tightwire.training.engine.units import UnitShard, cut


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatShard:
    """One unit's fp32 main shard on this rank: (N,), padding included, and the pieces of parameters that lie in it."""

    unit: str
    flat_N: Tensor
    shard: UnitShard


class SavedPiece(NamedTuple):
    """(length,) numbers of something that is (total,) long over all ranks, from ``start``; ``key`` names that."""

    key: str
    total: int
    start: int
    numbers: Tensor


def flat_shards(engine: Engine) -> list[FlatShard]:
    """All of this rank, frozen ones too, in the order of the model."""
    ranks, rank = engine.plan.shard_ranks, engine.shard_rank
    return [FlatShard(unit=flat.name, flat_N=main, shard=cut(flat, rank, ranks)) for flat, main in engine.named_flats()]


def pieces_of(prefix: str, shard: FlatShard, numbers_N: Tensor) -> Iterator[SavedPiece]:
    """Views of ``numbers_N``, which lies like the shard: one for each parameter, under ``prefix/parameter``."""
    for piece in shard.shard.pieces:
        if piece.num_elems:
            yield SavedPiece(f"{prefix}/{piece.parameter}", piece.parameter_elems, piece.offset, numbers_N[piece.place])
