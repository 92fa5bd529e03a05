"""The parts of parameters that a rank saves, in the same form for every sharding."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tightwire.training.engine.engine import Engine
from tightwire.training.engine.units import UnitShard, cut


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatShard:
    """One unit's float32 main shard on this rank, (N,) with padding, and the pieces of parameters in it."""

    unit: str
    flat_N: Tensor
    shard: UnitShard


class SavedPiece(NamedTuple):
    """Elements from ``start`` on of the (total,) tensor ``key``; ``numbers`` is 1-D."""

    key: str
    total: int
    start: int
    numbers: Tensor


def flat_shards(engine: Engine) -> list[FlatShard]:
    """All shards of this rank, frozen ones too, in the order of the plan."""
    ranks, rank = engine.plan.shard_ranks, engine.shard_rank
    return [FlatShard(unit=flat.name, flat_N=main, shard=cut(flat, rank, ranks)) for flat, main in engine.named_flats()]


def pieces_of(prefix: str, shard: FlatShard, numbers_N: Tensor) -> Iterator[SavedPiece]:
    """Views of ``numbers_N``, which has the layout of the shard: one per parameter, with key ``prefix/parameter``."""
    for piece in shard.shard.pieces:
        if piece.num_elems:
            yield SavedPiece(f"{prefix}/{piece.parameter}", piece.parameter_elems, piece.offset, numbers_N[piece.place])
