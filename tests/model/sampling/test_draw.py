"""The draw against brute force: numpy in float64, one row at a time."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_in_process
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import tiny_config
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.kernels.linear import linear
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.layout import make_layout
from tightwire.model.parallel import TensorParallel
from tightwire.model.sampling.draw import (
    Filters,
    best_candidates,
    candidates_needed,
    draw,
    mix_seed,
    scatter_candidates,
    uniforms,
)
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler

MASK = 0xFFFF_FFFF_FFFF_FFFF


def filters(temperature: float = 1.0, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0, *, vocab: int) -> Filters:
    ranked = top_p < 1 or 0 < top_k < vocab
    return Filters(
        temperature_R1=torch.tensor([[temperature]]),
        min_p_R1=torch.tensor([[min_p]]) if min_p else None,
        top_k_R1=torch.tensor([[top_k or vocab]]) if ranked else None,
        top_p_R1=torch.tensor([[top_p]], dtype=torch.float64) if ranked else None,
    )


def draw_many(logits: np.ndarray, f: Filters, uniform: np.ndarray) -> np.ndarray:
    """One logits row, as many draws as there are uniform numbers."""
    index = torch.zeros(len(uniform), dtype=torch.int64)
    rows = torch.from_numpy(logits.astype(np.float32))[None].repeat(len(uniform), 1)
    return draw(rows, rows.max(-1).values, f.rows(index), torch.from_numpy(uniform)).numpy()


def reference_share(
    logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[np.ndarray, float]:
    """The filtered distribution; each filter is applied to the renormalized result of the previous one, ties by id.

    Also how near a cut comes to top_p or min_p: within rounding it may fall on either side.
    """
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    near = np.abs(p / p.max() - min_p).min() if min_p else 1.0
    p[p < min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    near = min(near, np.abs(before - top_p)[p[order] > 0].min())
    p[order[before >= top_p]] = 0.0
    return p / p.sum(), near


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 60),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.2, 0.001]),
    ties=st.booleans(),
)
def test_draws_follow_the_filtered_distribution(
    seed: int, vocab: int, spread: float, temperature: float, min_p: float, top_k: int, top_p: float, ties: bool
) -> None:
    logits = np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)
    if ties:
        logits = np.round(logits)
    wanted, near = reference_share(logits, temperature, min_p, top_k, top_p)
    assume(near > 1e-5)
    grid = (np.arange(500) + 0.5) / 500
    drawn = draw_many(logits, filters(temperature, min_p, min(top_k, vocab), top_p, vocab=vocab), grid)
    # An even grid of uniform numbers hits each token's interval within one grid step at either end.
    got = np.bincount(drawn, minlength=vocab) / len(grid)
    assert np.abs(got - wanted).max() <= 1.0001 / len(grid) + 1e-5
    assert not got[wanted == 0].any()


@pytest.mark.parametrize(("spread", "top_p"), [(0.01, 0.1), (0.01, 0.9), (8.0, 0.9)])
@pytest.mark.parametrize("top_k", [0, 1024, 1025, 3000])
def test_rows_that_need_the_whole_sort(top_p: float, top_k: int, spread: float) -> None:
    """With a vocabulary above the width, nearly flat rows need the whole sort, peaked ones do not."""
    vocab = 4000
    logits = np.random.default_rng(3).normal(0, spread, vocab).astype(np.float32)
    wanted, near = reference_share(logits, 1.0, 0.0, top_k, top_p)
    assert near > 1e-6
    drawn = draw_many(logits, filters(1.0, 0.0, top_k, top_p, vocab=vocab), (np.arange(3000) + 0.5) / 3000)
    got = np.bincount(drawn, minlength=vocab) / 3000
    assert np.abs(got - wanted).max() <= 1.0001 / 3000 + 1e-5
    assert not got[wanted == 0].any()


def test_uniform_numbers_at_the_ends_of_the_interval() -> None:
    logits = np.array([-np.inf, 2.0, 1.0, -np.inf], np.float32)
    last = np.array([0.0, 1 - 2.0**-53])
    assert draw_many(logits, filters(vocab=4), last).tolist() == [1, 2]
    assert draw_many(logits, filters(top_p=0.99, vocab=4), last).tolist() == [1, 2]
    assert draw_many(logits, filters(top_p=1e-9, vocab=4), last).tolist() == [1, 1]
    assert draw_many(logits, filters(temperature=1e30, vocab=4), last).tolist() == [1, 2]


def test_equal_tokens_are_filtered_in_order_of_id() -> None:
    logits = np.zeros(3000, np.float32)
    for top_k in (3, 1500):
        drawn = draw_many(logits, filters(top_k=top_k, vocab=3000), np.linspace(0, 1, 3001)[:-1])
        assert set(drawn.tolist()) == set(range(top_k))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_nan_rows_give_an_id_in_the_vocabulary(bad: float, top_p: float) -> None:
    drawn = draw_many(np.full(1500, bad, np.float32), filters(top_p=top_p, vocab=1500), np.array([0.0, 0.5, 0.999]))
    assert ((drawn >= 0) & (drawn < 1500)).all()


def reference_uniform(seed: int, position: int) -> float:
    """Splitmix64 in Python integers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    return (mix((mix(seed & MASK) + position * 0x9E3779B97F4A7C15) & MASK) >> 11) * 2.0**-53


@given(seed=st.integers(-(2**63), 2**64), position=st.integers(0, 2**31))
def test_uniform_numbers_are_splitmix64(seed: int, position: int) -> None:
    got = uniforms(np.array([mix_seed(seed)], np.uint64), np.array([position], np.uint64))
    assert got.tolist() == [reference_uniform(seed, position)]
    assert 0 <= got[0] < 1


def test_splitmix64_matches_its_published_sequence() -> None:
    """First outputs of the reference implementation for seed 1234567 (S. Vigna, splitmix64.c)."""
    seeds = np.full(3, 1234567, np.uint64)
    got = uniforms(seeds, np.arange(3, dtype=np.uint64))
    published = np.array([6457827717110365317, 3203168211198807973, 9817491932198370423], np.uint64)
    assert got.tolist() == ((published >> np.uint64(11)).astype(np.float64) * 2.0**-53).tolist()


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_uniform_numbers_are_uniform_and_uncorrelated(along: str) -> None:
    n = 20000
    seeds = np.array([mix_seed(s) for s in (range(n) if along == "seeds" else [5] * n)], np.uint64)
    positions = np.arange(n, dtype=np.uint64) if along == "positions" else np.zeros(n, np.uint64)
    u = uniforms(seeds, positions)
    counts = np.bincount((u * 50).astype(int), minlength=50)
    assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 110  # chi-square, 49 degrees of freedom: p = 1e-6
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / np.sqrt(n)


def chi_square(drawn: Tensor, share: np.ndarray) -> float:
    expected = share * len(drawn)
    return float(((np.bincount(drawn.numpy(), minlength=len(share)) - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kw", [{}, {"temperature": 0.5}, {"top_p": 0.9999999}])
def test_draws_over_seeds_agree_with_the_distribution(kw: dict[str, float]) -> None:
    vocab, n = 8, 20000
    logits = np.random.default_rng(0).normal(0, 1, vocab).astype(np.float32)
    u = uniforms(np.array([mix_seed(seed) for seed in range(n)], np.uint64), np.full(n, 3, np.uint64))
    f = filters(**kw, vocab=vocab)  # pyright: ignore[reportArgumentType]
    share = np.exp(logits / kw.get("temperature", 1.0))
    # Chi-square with 7 degrees of freedom exceeds 40 once in a million; the seeds are fixed.
    assert chi_square(torch.from_numpy(draw_many(logits, f, u)), share / share.sum()) < 40


VOCAB = 90


class Row:
    def __init__(self, **params: Any) -> None:
        self.params = SamplingParams(max_tokens=9, **params)
        self.stop_ids: frozenset[int] = frozenset()
        self.token_ids, self.num_prompt_tokens = [1, 2], 1


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        ({"temperature": 0.0}, 1),
        ({"temperature": 1.0, "top_k": 1}, 1),
        ({"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.1}, 40),
        ({"temperature": 1.0, "top_k": 257}, 0),
        ({"temperature": 1.0}, 0),
        ({"temperature": 1.0, "top_p": 0.5}, 0),
        ({"temperature": 0.0, "logprobs": 0}, 0),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, 0),
        ({"temperature": 0.0, "min_tokens": 1}, 0),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, 0),
    ],
)
def test_candidates_needed(params: dict[str, Any], needed: int) -> None:
    assert candidates_needed(SamplingParams(max_tokens=1, **params)) == needed


def _joined(logits_RV: Tensor, count: int, cuts: list[int]) -> Tensor:
    """Candidates of ranks that hold the columns between ``cuts``, joined."""
    bounds = [0, *sorted(cuts), VOCAB]
    keys = [best_candidates(logits_RV[:, first:stop], count, first) for first, stop in pairwise(bounds)]
    return scatter_candidates(torch.cat(keys, dim=1), VOCAB)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    levels=st.sampled_from([2, 9, 1000]),
    cuts=st.sets(st.integers(10, 80), max_size=3).filter(lambda s: all(abs(a - b) >= 10 for a in s for b in s - {a})),
    top_k=st.sampled_from([0, 1, 2, 5, 10]),
)
def test_candidates_give_the_same_choice_as_whole_rows(
    seed: int, dtype: torch.dtype, levels: int, cuts: set[int], top_k: int
) -> None:
    """With few levels many logits are equal; the lowest ids come first for any cuts."""
    random = torch.Generator().manual_seed(seed)
    logits_RV = torch.randint(-levels, levels, (4, VOCAB), generator=random).to(dtype) * 0.01
    rows = [Row(temperature=0.7 if top_k else 0.0, top_k=top_k, top_p=0.9, min_p=0.05, seed=r) for r in range(4)]
    joined_RV = _joined(logits_RV, candidates_needed(rows[0].params), sorted(cuts))
    assert Sampler(VOCAB).sample(joined_RV, rows) == Sampler(VOCAB).sample(logits_RV.float(), rows)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf")])
def test_nan_candidates_are_kept(count: int, odd: float) -> None:
    logits_RV = torch.zeros(2, VOCAB)
    logits_RV[1, 60] = odd
    joined_RV = _joined(logits_RV, count, [45])
    rows = [Row(temperature=0.0), Row(temperature=0.0)]
    assert Sampler(VOCAB).sample(joined_RV, rows).token_ids == [0, -1]


def test_zeros_of_both_signs_are_equal_and_all_minus_infinity_is_no_choice() -> None:
    logits_RV = torch.full((2, VOCAB), -torch.inf)
    logits_RV[0, 50], logits_RV[0, 20] = 0.0, -0.0
    joined_RV = _joined(logits_RV, 1, [45])
    rows = [Row(temperature=0.0), Row(temperature=0.0)]
    assert Sampler(VOCAB).sample(joined_RV, rows).token_ids == [20, -1]


def _logits(group: Group, num_candidates: int) -> tuple[Tensor | None, int]:
    config = config_from_hf(tiny_config())
    layout = make_layout(config, group.world_size, None)
    parallel = TensorParallel(group, layout, None)
    hidden_RD = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rows = parallel.shard.vocab_rows
    head_VD = torch.randn(config.vocab_size, 64, generator=torch.Generator().manual_seed(2))[rows.start : rows.stop]
    return parallel.gather_logits(linear(hidden_RD, head_VD, out_dtype=torch.float32), num_candidates), group.bytes_sent


@pytest.mark.parametrize("num_candidates", [1, 7])
def test_ranks_send_eight_bytes_a_candidate(num_candidates: int) -> None:
    (whole_RV, _), *_ = run_in_process(3, _logits, 0)
    (some_RV, sent), *others = run_in_process(3, _logits, num_candidates)
    assert whole_RV is not None and some_RV is not None and all(logits is None for logits, _ in others)
    kept = some_RV.isfinite()
    assert kept.sum(-1).tolist() == [3 * num_candidates] * 3
    assert torch.equal(some_RV[kept], whole_RV[kept])
    assert torch.equal(some_RV.topk(num_candidates).values, whole_RV.topk(num_candidates).values)
    assert sent == 2 * 3 * num_candidates * 8


@pytest.mark.parametrize("num_candidates", [0, 60, 102])
def test_whole_rows_are_sent_when_smaller_or_needed(num_candidates: int) -> None:
    (logits_RV, sent), *_ = run_in_process(3, _logits, num_candidates)
    assert logits_RV is not None and logits_RV.isfinite().all()
    assert sent == 2 * 3 * make_layout(config_from_hf(tiny_config()), 3, None).max_vocab_rows * 4
