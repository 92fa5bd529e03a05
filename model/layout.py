"""Which part of the model each rank holds: every half of a layer split as evenly as it can be.

Attention is cut between query heads. A cut inside the group of a KV head has that head kept by both ranks, which costs its
key and value weights and its place in the cache twice: SmolLM2's nine heads in three groups go to two ranks as
five and four, with two KV heads each. The MLP can be cut at any column and is cut evenly. It does not make up for
the heads: ranks wait for each other after the attention and again after the MLP, so a layer takes as long as the slowest
attention and then the slowest MLP, and fewer columns for the rank with more heads would only make the other's MLP the
slower.

Knows sizes only: no tensors, no files, no devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tightwire.model.config import LlamaConfig

# MLP columns are dealt in units of this many: numbers of packed weights that share a scale, and a cache line of 16 bits.
# The same for plain weights, so that a model is cut alike however it is kept.
_COLUMN_UNIT = 32
_VOCAB_UNIT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's part, as ranges over the whole model's heads, columns and rows."""

    rank: int
    world_size: int
    query_heads: range
    kv_heads: range
    mlp_columns: range
    vocab_rows: range

    @property
    def local_heads(self) -> int:
        return len(self.query_heads)

    @property
    def local_kv_heads(self) -> int:
        return len(self.kv_heads)

    def skipped_heads(self, heads_per_kv_head: int) -> int:
        """Query heads of this rank's first KV head that the rank before it has."""
        return self.query_heads.start % heads_per_kv_head


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The shards of all ranks; equal as far as heads allow, or following ``shares``."""

    shards: tuple[Shard, ...]

    @property
    def max_vocab_rows(self) -> int:
        """Rows every rank pads its logits to, because a gather wants equal sizes."""
        return max(len(shard.vocab_rows) for shard in self.shards)


def make_layout(config: LlamaConfig, world_size: int, shares: Sequence[float] | None = None) -> Layout:
    """Split ``config`` over ``world_size`` ranks in proportion to ``shares`` (default: equal).

    Raises:
        ValueError: more ranks than query heads, MLP columns or vocabulary rows, or not one share above 0 for each rank.
    """
    shares = _normalized(config, world_size, shares)
    heads = _split_heads(config, shares)
    if config.mlp_size < world_size:
        raise ValueError(f"cannot split {config.mlp_size} MLP columns over {world_size} ranks")
    columns = _ranges(_apportion(config.mlp_size, shares, unit=_COLUMN_UNIT, at_least=1))
    if config.vocab_size < world_size:
        raise ValueError(f"cannot split {config.vocab_size} vocabulary rows over {world_size} ranks")
    rows = _ranges(_apportion(config.vocab_size, shares, unit=_VOCAB_UNIT, at_least=1))
    return Layout(
        shards=tuple(
            Shard(
                rank=rank,
                world_size=world_size,
                query_heads=heads[rank][0],
                kv_heads=heads[rank][1],
                mlp_columns=columns[rank],
                vocab_rows=rows[rank],
            )
            for rank in range(world_size)
        )
    )


def _normalized(config: LlamaConfig, world_size: int, shares: Sequence[float] | None) -> list[float]:
    if world_size > config.num_heads:
        raise ValueError(
            f"cannot split {config.num_heads} query heads over {world_size} ranks; use --tp {config.num_heads} or less"
        )
    shares = [1.0] * world_size if shares is None else list(shares)
    if len(shares) != world_size or min(shares) <= 0:
        raise ValueError(f"--tp-split needs {world_size} numbers above 0, one per rank, got {shares}")
    return [share / sum(shares) for share in shares]


def _split_heads(config: LlamaConfig, shares: list[float]) -> list[tuple[range, range]]:
    """Query heads and KV heads of each rank, both contiguous and in rank order.

    No rank gets more KV heads than its share of them, rounded up, because the cache's size goes by whoever has most. Of such
    cuts that by which the slowest rank multiplies least, then the one that keeps fewest KV heads twice, then the most
    even one; ties to lower ranks.
    """
    cuts = _HeadCuts(config, shares)
    limit, end = cuts.least_cost(), len(cuts.places) - 1
    best: dict[int, tuple[int, float, tuple[int, ...]]] = {end: (0, 0.0, ())}  # of the ranks behind, by first cut
    for rank in reversed(range(len(shares))):
        behind, best = best, {}
        for start in range(rank, end):
            for stop in range(end, start, -1):
                if stop in behind and cuts.cost(rank, start, stop) <= limit:
                    query, kv = cuts.heads(start, stop)
                    kept, uneven = behind[stop][0] + len(kv), behind[stop][1] + len(query) ** 2 / shares[rank]
                    if start not in best or (kept, uneven) < best[start][:2]:
                        best[start] = kept, uneven, (stop, *behind[stop][2])
    return [cuts.heads(start, stop) for start, stop in pairwise((0, *best[0][2]))]


class _HeadCuts:
    """Where query heads may be cut, and what ranks have to do for the heads between two cuts."""

    def __init__(self, config: LlamaConfig, shares: list[float]) -> None:
        self._per_kv, self._shares = config.heads_per_kv_head, shares
        self._most_kv = [math.ceil(config.num_kv_heads * share - 1e-9) for share in shares]
        every = range(config.num_heads + 1)
        whole = [head for head in every if head % self._per_kv == 0 or head * config.head_dim % _COLUMN_UNIT == 0]
        self.places = whole if len(whole) > len(shares) else list(every)

    def heads(self, start: int, stop: int) -> tuple[range, range]:
        """Query heads between two cuts, and the KV heads that they need."""
        query = range(self.places[start], self.places[stop])
        return query, range(query.start // self._per_kv, -(-query.stop // self._per_kv))

    def cost(self, rank: int, start: int, stop: int) -> float:
        """Rows of projections for a share of 1: queries' and outputs', keys' and values'; inf: too many KV heads."""
        query, kv = self.heads(start, stop)
        return 2 * (len(query) + len(kv)) / self._shares[rank] if len(kv) <= self._most_kv[rank] else math.inf

    def least_cost(self) -> float:
        """The smallest that all ranks can keep to."""
        alike, cuts = {share: rank for rank, share in enumerate(self._shares)}, range(len(self.places))
        costs = {self.cost(rank, start, stop) for rank in alike.values() for stop in cuts for start in cuts[:stop]}
        return min(cost for cost in costs if self._fits(cost))

    def _fits(self, limit: float) -> bool:
        """Whether no rank need cost more: each takes as many heads as it may, and leaves some for each behind it."""
        start, end, num_ranks = 0, len(self.places) - 1, len(self._shares)
        for rank in range(num_ranks):
            last = end - (num_ranks - 1 - rank)
            fitting = (stop for stop in range(last, start, -1) if self.cost(rank, start, stop) <= limit)
            if (start := next(fitting, -1)) < 0:
                return False
        return start == end


def _apportion(total: int, shares: Sequence[float], *, unit: int, at_least: int) -> list[int]:
    """Deal ``total`` in whole units in proportion to ``shares``: largest remainders first, ties to lower ranks.

    A total that is not a multiple of ``unit``, or too small for every rank to get one, is dealt one by one.
    """
    if total % unit or total // unit < len(shares):
        unit = 1
    units = total // unit
    exact = [units * share / sum(shares) for share in shares]
    counts = [max(at_least, int(e)) for e in exact]
    while sum(counts) < units:
        neediest = max(range(len(shares)), key=lambda i: (exact[i] - counts[i], -i))
        counts[neediest] += 1
    while sum(counts) > units:
        richest = max((i for i in range(len(shares)) if counts[i] > at_least), key=lambda i: (counts[i] - exact[i], i))
        counts[richest] -= 1
    return [count * unit for count in counts]


def _ranges(counts: Sequence[int]) -> list[range]:
    """Consecutive ranges of the given lengths."""
    ranges, start = [], 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return ranges
