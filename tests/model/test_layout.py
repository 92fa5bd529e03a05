"""The split: every head, column and row is held once (KV heads at least once), and as evenly as heads allow."""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import make_layout


def _config(
    *, heads: int = 9, kv_heads: int = 3, mlp: int = 1536, vocab: int = 49152, head_dim: int = 64
) -> LlamaConfig:
    return LlamaConfig(
        num_layers=30,
        hidden_size=576,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp,
        vocab_size=vocab,
        max_positions=8192,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
def test_columns_are_even_for_uneven_heads(world_size: int) -> None:
    """Ranks wait for each other after each half of a layer, so one half cannot make up for the other."""
    columns = [len(shard.mlp_columns) for shard in make_layout(_config(), world_size).shards]

    assert max(columns) - min(columns) <= 32 and sum(columns) == 1536


def _heads(heads: int, kv_heads: int, world_size: int) -> list[tuple[int, int]]:
    shards = make_layout(_config(heads=heads, kv_heads=kv_heads), world_size).shards
    return [(shard.local_heads, shard.local_kv_heads) for shard in shards]


def test_smollm2_on_two_ranks_keeps_the_middle_kv_head_twice() -> None:
    assert _heads(9, 3, 2) == [(5, 2), (4, 2)]
    assert [shard.head_groups(3) for shard in make_layout(_config(), 2).shards] == [(3, 0), (3, 2)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "split"),
    [
        (32, 8, [(16, 4)] * 2),
        (32, 8, [(4, 1)] * 8),
        (32, 8, [(12, 3), (12, 3), (8, 2)]),  # 11, 10 and 11 would have one rank keep four KV heads
        (32, 8, [(2, 1)] * 16),
        (9, 3, [(3, 1), (3, 1), (2, 1), (1, 1)]),
        (15, 5, [(8, 3), (7, 3)]),
        (40, 40, [(14, 14), (13, 13), (13, 13)]),
    ],
)
def test_heads_are_even_as_far_as_caches_are(heads: int, kv_heads: int, split: list[tuple[int, int]]) -> None:
    assert _heads(heads, kv_heads, len(split)) == split


def test_shares_are_followed() -> None:
    first, second = make_layout(_config(), 2, [2, 1]).shards

    assert (first.local_heads, second.local_heads) == (6, 3)
    assert (len(first.mlp_columns), len(second.mlp_columns)) == (1024, 512)


@given(
    kv_heads=st.integers(1, 4),
    per_kv=st.integers(1, 3),
    head_dim=st.sampled_from([16, 48, 64, 80, 100]),
    shares=st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0]), min_size=1, max_size=4),
)
def test_no_cut_that_is_as_good_for_caches_and_packed_weights_is_faster(
    kv_heads: int, per_kv: int, head_dim: int, shares: list[float]
) -> None:
    num_heads, world_size = kv_heads * per_kv, len(shares)
    assume(world_size <= num_heads)
    config = _config(heads=num_heads, kv_heads=kv_heads, head_dim=head_dim)
    shards = make_layout(config, world_size, shares).shards

    def kept(start: int, stop: int) -> int:
        return -(-stop // per_kv) - start // per_kv

    def cost(cuts: Sequence[int]) -> float:
        parts = zip(pairwise(cuts), shares, strict=True)
        return max((stop - start + kept(start, stop)) / share for (start, stop), share in parts)

    chosen = [0, *(shard.query_heads.stop for shard in shards)]
    most_kv = max(shard.local_kv_heads for shard in shards)
    # An aligned cut is preferred to a faster one, if it is no slower than whole KV heads.
    aligned = all(cut * head_dim % 32 == 0 for cut in chosen[1:-1])
    for inner in combinations(range(1, num_heads), world_size - 1):
        cuts = [0, *inner, num_heads]
        if max(kept(*part) for part in pairwise(cuts)) > most_kv or (
            aligned and any(cut * head_dim % 32 for cut in inner)
        ):
            continue
        if not aligned and any(cut * head_dim % 32 and cut % per_kv for cut in inner):
            continue
        assert cost(chosen) <= cost(cuts) + 1e-9
    for inner in combinations(range(per_kv, num_heads, per_kv), world_size - 1):
        cuts = [0, *inner, num_heads]
        assert cost(chosen) <= cost(cuts) + 1e-9 or max(kept(*part) for part in pairwise(cuts)) > most_kv


@given(
    kv_heads=st.integers(1, 8),
    per_kv=st.integers(1, 8),
    mlp=st.integers(16, 4000),
    vocab=st.integers(64, 40000),
    world_size=st.integers(1, 8),
    shares=st.lists(st.floats(0.25, 4.0), min_size=8, max_size=8),
)
def test_everything_is_held(
    kv_heads: int, per_kv: int, mlp: int, vocab: int, world_size: int, shares: list[float]
) -> None:
    assume(world_size <= kv_heads * per_kv and mlp >= world_size)
    config = _config(heads=kv_heads * per_kv, kv_heads=kv_heads, mlp=mlp, vocab=vocab)

    shards = make_layout(config, world_size, shares[:world_size]).shards

    assert [h for shard in shards for h in shard.query_heads] == list(range(config.num_heads))
    assert [c for shard in shards for c in shard.mlp_columns] == list(range(mlp))
    assert [v for shard in shards for v in shard.vocab_rows] == list(range(vocab))
    assert {k for shard in shards for k in shard.kv_heads} == set(range(kv_heads))
    for shard in shards:
        # Each query head sits with its own KV head; no rank has more of those than if they were dealt whole.
        assert {h // per_kv for h in shard.query_heads} == set(shard.kv_heads)
        largest = max(shares[:world_size]) / sum(shares[:world_size])
        assert shard.local_kv_heads <= (1 if world_size > kv_heads else max(1, math.ceil(kv_heads * largest)))
        assert len(shard.mlp_columns) > 0 and len(shard.vocab_rows) > 0


def test_more_ranks_than_heads_is_refused_with_a_value_that_works() -> None:
    with pytest.raises(ValueError, match=r"9 query heads over 10 ranks; use --tp 9"):
        make_layout(_config(), 10)


def test_wrong_number_of_shares_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 numbers"):
        make_layout(_config(), 3, [1, 2])
