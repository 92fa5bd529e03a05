"""The split of a model over ranks: attention and MLP of every layer, each as evenly as possible.

Attention is cut between query heads. When a cut falls inside the group of a KV head, both ranks keep that head, which costs
its key and value weights and its place in the cache twice: SmolLM2's nine heads in three groups go to two ranks as five and
four, with two KV heads each. The MLP can be cut at any column and is cut evenly. It does not compensate for the heads: ranks
wait for each other after the attention and again after the MLP, so fewer columns for the rank with more heads would only
make the other rank's MLP slower.

Sizes only: no tensors, no files, no devices.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tightwire.kernels.spec.attention import HeadGroups
from tightwire.model.checkpoint.config import LlamaConfig

# MLP columns are dealt in units of this many: numbers of packed weights that share a scale, and a cache line of 16-bit ones.
# Plain weights are cut in the same places, so the split does not depend on the formats.
_COLUMN_UNIT = 32
_VOCAB_UNIT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's ranges of the whole model's heads, columns and rows."""

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

    def head_groups(self, heads_per_kv_head: int) -> HeadGroups:
        """The groups of this rank's query heads that share a KV head."""
        skipped = self.query_heads.start % heads_per_kv_head
        return HeadGroups.of_part(self.local_heads, self.local_kv_heads, heads_per_kv_head, skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The shards of all ranks, as equal as heads allow, or following ``shares``."""

    shards: tuple[Shard, ...]

    @property
    def max_vocab_rows(self) -> int:
        """Rows to which every rank pads its logits, because a gather needs equal sizes."""
        return max(len(shard.vocab_rows) for shard in self.shards)


def make_layout(config: LlamaConfig, world_size: int, shares: Sequence[float] | None = None) -> Layout:
    """Split ``config`` over ``world_size`` ranks in proportion to ``shares`` (default: equal).

    Raises:
        ValueError: more ranks than query heads, MLP columns or vocabulary rows, or shares that are not one above 0 per rank.
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

    No rank gets more KV heads than if whole groups were dealt, because the rank with the most limits the length of the cache.
    Among such cuts: the least work for the slowest rank, then the fewest KV heads kept twice, then the most even cut; ties go
    to lower ranks.
    """
    heads = range(config.num_heads + 1)
    whole = [head for head in heads if head % config.heads_per_kv_head == 0]
    # First the places where packed columns can be cut (plain weights are cut there too), if that is no slower than whole groups.
    aligned = [head for head in heads if head * config.head_dim % _COLUMN_UNIT == 0 or head in (0, config.num_heads)]
    least_whole = _HeadCuts(config, shares, whole).least_cost
    for places in (aligned, sorted({*aligned, *whole}), heads):
        cuts = _HeadCuts(config, shares, places)
        if cuts.least_cost < math.inf and cuts.least_cost <= least_whole:
            return cuts.best()
    raise AssertionError("heads can always be cut, in whole groups or each group among some ranks")


class _HeadCuts:
    """The ways to cut query heads at some of ``places``, always the first and the last, so that each rank gets some."""

    def __init__(self, config: LlamaConfig, shares: list[float], places: Sequence[int]) -> None:
        self._per_kv, self._shares, self._places = config.heads_per_kv_head, shares, places
        self._end, num_kv = len(places) - 1, config.num_kv_heads
        self._most_kv = 1 if len(shares) > num_kv else max(_apportion(num_kv, shares, unit=1, at_least=1))
        self.least_cost = self._least_cost()  # the smallest cost limit for all ranks; inf: there is no cut

    def best(self) -> list[tuple[range, range]]:
        # For the ranks from here on, by the cut before them: KV heads kept, unevenness, and the cuts.
        found: dict[int, tuple[int, float, tuple[int, ...]]] = {self._end: (0, 0.0, ())}
        for rank in reversed(range(len(self._shares))):
            behind, found = found, {}
            for start, stop in self._parts(rank, self.least_cost):
                if stop in behind:
                    query, kv = self._heads(start, stop)
                    kept, uneven, cuts = behind[stop]
                    kept, uneven = kept + len(kv), uneven + len(query) ** 2 / self._shares[rank]
                    if start not in found or (kept, uneven) <= found[start][:2]:
                        found[start] = kept, uneven, (stop, *cuts)
        return [self._heads(start, stop) for start, stop in pairwise((0, *found[0][2]))]

    def _least_cost(self) -> float:
        least = {self._end: 0.0}
        for rank in reversed(range(len(self._shares))):
            behind, least = least, {}
            for start, stop in self._parts(rank, math.inf):
                if stop in behind:
                    cost = max(self._cost(rank, start, stop), behind[stop])
                    least[start] = min(cost, least.get(start, math.inf))
        return least.get(0, math.inf)

    def _parts(self, rank: int, limit: float) -> Iterator[tuple[int, int]]:
        """Cuts before and after ``rank``'s heads that cost at most ``limit``, smaller parts first."""
        for start in range(rank, self._end):
            for stop in range(start + 1, self._end + 1):
                if len(self._heads(start, stop)[1]) > self._most_kv or self._cost(rank, start, stop) > limit:
                    break
                yield start, stop

    def _heads(self, start: int, stop: int) -> tuple[range, range]:
        """Query heads between two cuts, and the KV heads that they need."""
        query = range(self._places[start], self._places[stop])
        return query, range(query.start // self._per_kv, -(-query.stop // self._per_kv))

    def _cost(self, rank: int, start: int, stop: int) -> float:
        """Rows of the projections of queries, outputs, keys and values, for a share of 1."""
        return 2 * sum(map(len, self._heads(start, stop))) / self._shares[rank]


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
