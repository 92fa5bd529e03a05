"""The split: every head, column and row is held once (KV heads at least once), and as evenly as heads allow."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tightwire.model.config import LlamaConfig
from tightwire.model.layout import make_layout


def _config(*, heads: int = 9, kv_heads: int = 3, mlp: int = 1536, vocab: int = 49152) -> LlamaConfig:
    return LlamaConfig(
        num_layers=30,
        hidden_size=576,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        mlp_size=mlp,
        vocab_size=vocab,
        max_positions=8192,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
def test_columns_are_even_whoever_has_more_heads(world_size: int) -> None:
    """Ranks wait for each other after each half of a layer, so one half cannot make up for the other."""
    columns = [len(shard.mlp_columns) for shard in make_layout(_config(), world_size).shards]

    assert max(columns) - min(columns) <= 32 and sum(columns) == 1536


def test_smollm2_on_two_ranks_splits_three_kv_heads_two_to_one() -> None:
    first, second = make_layout(_config(), 2).shards

    assert (first.local_heads, first.local_kv_heads, second.local_heads, second.local_kv_heads) == (6, 2, 3, 1)


def test_shares_are_followed() -> None:
    first, second = make_layout(_config(), 2, [2, 1]).shards

    assert (first.local_heads, second.local_heads) == (6, 3)
    assert (len(first.mlp_columns), len(second.mlp_columns)) == (1024, 512)


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
        # Each query head sits with its own KV head, and a rank's groups are equal.
        assert {h // per_kv for h in shard.query_heads} == set(shard.kv_heads)
        assert shard.local_heads % shard.local_kv_heads == 0
        assert len(shard.mlp_columns) > 0 and len(shard.vocab_rows) > 0


def test_more_ranks_than_heads_is_refused_with_a_value_that_works() -> None:
    with pytest.raises(ValueError, match=r"9 query heads over 10 ranks; use --tp 9"):
        make_layout(_config(), 10)


def test_wrong_number_of_shares_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 numbers"):
        make_layout(_config(), 3, [1, 2])
