"""Splits a model over ranks: attention and MLP of every layer, each as evenly as possible.

Attention is cut between query heads. If a cut falls inside the group of a KV head, both ranks keep that head, with its
weights and its cache. Ranks wait for each other after the attention and again after the MLP, so the MLP is cut evenly
even if the heads are not (docs/weights.md).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tightwire.kernels.spec.attention import HeadGroups
from tightwire.model.checkpoint.config import LlamaConfig, check_ranks

# MLP columns are split in multiples of this: 32 packed weights share a scale, and 32 numbers of 16 bits fill a cache
# line. Plain weights are cut in the same places; superblocks of 256 numbers need larger units.
_COLUMN_UNIT = 32
_VOCAB_UNIT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's ranges of the model's heads, columns and rows."""

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
        """Return the groups of this rank's query heads that share a KV head."""
        skipped = self.query_heads.start % heads_per_kv_head
        return HeadGroups.of_part(self.local_heads, self.local_kv_heads, heads_per_kv_head, skipped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The shards of all ranks."""

    shards: tuple[Shard, ...]


def make_layout(
    config: LlamaConfig,
    world_size: int,
    shares: Sequence[float] | None = None,
    *,
    units: tuple[int, int] = (_COLUMN_UNIT, _COLUMN_UNIT),
) -> Layout:
    """Split ``config`` over ``world_size`` ranks in proportion to ``shares`` (default: equal).

    ``units``: attention outputs and MLP columns that should stay together (``WeightFormats.column_units``).
    Raises ValueError: more ranks than query heads, MLP columns or vocabulary rows, or not one positive share per rank.
    """
    check_ranks(config.num_heads, world_size)
    shares = [1.0] * world_size if shares is None else list(shares)
    if len(shares) != world_size or min(shares) <= 0:
        raise ValueError(f"--tp-split needs {world_size} numbers above 0, one per rank, got {shares}")
    shares = [share / sum(shares) for share in shares]
    heads = _split_heads(config, shares, units[0])
    for what, size in (("MLP columns", config.mlp_size), ("vocabulary rows", config.vocab_size)):
        if size < world_size:
            raise ValueError(f"cannot split {size} {what} over {world_size} ranks")
    columns = _ranges(_apportion(config.mlp_size, shares, unit=units[1]))
    rows = _ranges(_apportion(config.vocab_size, shares, unit=_VOCAB_UNIT))
    parts = enumerate(zip(heads, columns, rows, strict=True))
    return Layout(
        shards=tuple(
            Shard(rank=rank, world_size=world_size, query_heads=query, kv_heads=kv, mlp_columns=mlp, vocab_rows=vocab)
            for rank, ((query, kv), mlp, vocab) in parts
        )
    )


def whole_shard(config: LlamaConfig) -> Shard:
    """Return the shard of a rank that holds the whole model."""
    return make_layout(config, 1).shards[0]


def keep_layers(config: LlamaConfig, layers: Sequence[int]) -> LlamaConfig:
    """Return the description of a model with these layers alone, numbered anew."""
    kinds = config.sliding, config.nope
    sliding, nope = (tuple(own for own, layer in enumerate(layers) if layer in kind) for kind in kinds)
    return replace(config, num_layers=len(layers), sliding=sliding, nope=nope)


def stage_model(config: LlamaConfig, layers: range) -> LlamaConfig:
    """Return the description of these layers as a model of their own; the first stage embeds, and the last has the head."""
    has_head = layers.stop == config.num_layers
    return replace(keep_layers(config, layers), first_layer=layers.start, has_head=has_head)


def _split_heads(config: LlamaConfig, shares: list[float], unit: int) -> list[tuple[range, range]]:
    """Return each rank's query heads and KV heads, both contiguous and in rank order.

    The rank with the most KV heads limits the cache length, so no rank gets more than in a split by whole groups; where
    superblocks allow no such cut, one or two more. Among these splits the best has, in this order: the least work for the
    slowest rank, the fewest duplicated KV heads, the most even numbers of query heads. Ties go to lower ranks.
    """
    heads = range(config.num_heads + 1)
    whole = [head for head in heads if head % config.heads_per_kv_head == 0]
    # Prefer cuts that packed columns allow, unless whole groups are faster. Plain weights are cut in the same places.
    aligned = [head for head in heads if head * config.head_dim % unit == 0 or head in (0, config.num_heads)]
    least_whole = _HeadCuts(config, shares, whole).least_cost
    more_kv = (0, 1, 2) if unit > _COLUMN_UNIT else (0,)
    choices = [(aligned, more) for more in more_kv] + [(sorted({*aligned, *whole}), 0), (heads, 0)]
    for places, more in choices:
        cuts = _HeadCuts(config, shares, places, more)
        if cuts.least_cost < math.inf and (cuts.least_cost <= least_whole or unit > _COLUMN_UNIT):
            return cuts.best()
    raise AssertionError("heads can always be cut, in whole groups or each group among some ranks")


class _HeadCuts:
    """All splits of the query heads with cuts at ``places``, in which each rank gets at least one head.

    ``more_kv``: KV heads that a rank may have beyond those of a split by whole groups.
    """

    def __init__(self, config: LlamaConfig, shares: list[float], places: Sequence[int], more_kv: int = 0) -> None:
        self._per_kv, self._shares, self._places = config.heads_per_kv_head, shares, places
        self._end, num_kv = len(places) - 1, config.num_kv_heads
        by_groups = 1 if len(shares) > num_kv else max(_apportion(num_kv, shares, unit=1))
        self._most_kv = by_groups + more_kv
        self.least_cost = self._least_cost()  # cost of the slowest rank in the best split; inf: there is no split

    def best(self) -> list[tuple[range, range]]:
        # Best split of the remaining ranks by their first cut: KV heads kept, unevenness, later cuts.
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
        """Yield the cuts before and after ``rank``'s heads that cost at most ``limit``, smaller parts first."""
        for start in range(rank, self._end):
            for stop in range(start + 1, self._end + 1):
                if len(self._heads(start, stop)[1]) > self._most_kv or self._cost(rank, start, stop) > limit:
                    break
                yield start, stop

    def _heads(self, start: int, stop: int) -> tuple[range, range]:
        """Return the query heads between two cuts, and the KV heads that they need."""
        query = range(self._places[start], self._places[stop])
        return query, range(query.start // self._per_kv, -(-query.stop // self._per_kv))

    def _cost(self, rank: int, start: int, stop: int) -> float:
        """Return the work between two cuts, in heads of the q, o, k and v projections, divided by the rank's share."""
        return 2 * sum(map(len, self._heads(start, stop))) / self._shares[rank]


def _apportion(total: int, shares: Sequence[float], *, unit: int) -> list[int]:
    """Split ``total`` by ``shares`` in whole units (or of one): largest remainders, then lower ranks."""
    if total % unit or total // unit < len(shares):
        unit = 1
    units = total // unit
    exact = [units * share / sum(shares) for share in shares]
    counts = [max(1, int(wanted)) for wanted in exact]
    while sum(counts) < units:
        neediest = max(range(len(shares)), key=lambda i: (exact[i] - counts[i], -i))
        counts[neediest] += 1
    while sum(counts) > units:
        richest = max((i for i in range(len(shares)) if counts[i] > 1), key=lambda i: (counts[i] - exact[i], i))
        counts[richest] -= 1
    return [count * unit for count in counts]


def _ranges(counts: Sequence[int]) -> list[range]:
    """Return consecutive ranges of the given lengths."""
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]
