"""Which part of the model each rank holds: every half of a layer split as evenly as it can be.

Attention can only be cut between key/value heads (a query head must sit with its KV head), so SmolLM2's three KV heads
cannot be shared evenly by two ranks. The MLP can be cut at any column and is cut evenly. It does not make up for the
heads: ranks wait for each other after the attention and again after the MLP, so a layer takes as long as the slowest
attention and then the slowest MLP, and fewer columns for the rank with more heads would only make the other's MLP the
slower. With more ranks than KV heads, each KV head is kept by several ranks, which share its query heads.

Knows sizes only: no tensors, no files, no devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Query heads and KV heads of each rank, both contiguous and in rank order."""
    per_kv = config.heads_per_kv_head
    world_size = len(shares)
    if world_size <= config.num_kv_heads:
        kv_ranges = _ranges(_apportion(config.num_kv_heads, shares, unit=1, at_least=1))
        return [(range(kv.start * per_kv, kv.stop * per_kv), kv) for kv in kv_ranges]
    heads: list[tuple[range, range]] = []
    for kv_head, ranks in enumerate(_ranges(_apportion_ranks(world_size, config.num_kv_heads, per_kv))):
        inside = [shares[rank] for rank in ranks]
        for query in _ranges(_apportion(per_kv, inside, unit=1, at_least=1)):
            first = kv_head * per_kv
            heads.append((range(first + query.start, first + query.stop), range(kv_head, kv_head + 1)))
    return heads


def _apportion_ranks(world_size: int, num_kv_heads: int, per_kv: int) -> list[int]:
    """How many ranks keep each KV head, as even as possible; never more than it has query heads."""
    base, extra = divmod(world_size, num_kv_heads)
    counts = [base + (kv_head < extra) for kv_head in range(num_kv_heads)]
    assert max(counts) <= per_kv, "world_size <= num_heads was checked"
    return counts


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
