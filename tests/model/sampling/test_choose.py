"""Tokens are Gumbel-max draws from the filtered distribution, for every split of the vocabulary; bytes are the formula's."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model.ranked_sampling import RankedSampler, reference_noise
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import banned_ids
from torch import Tensor

from tightwire.model.sampling import choose
from tightwire.model.sampling.draw import FRONT
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.rows import Column, SampleRows
from tightwire.model.sampling.sampler import Wanted

VOCAB = 90


class Row:
    def __init__(self, token_ids: list[int] | None = None, **params: Any) -> None:
        self.params = SamplingParams(max_tokens=9, **params)
        self.stop_ids: frozenset[int] = frozenset({2})
        self.token_ids, self.num_prompt_tokens = token_ids or [1, 2], 1


def filtered(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, float]:
    """The filtered distribution; each filter is applied to the renormalized result of the previous one, ties by id.

    Also how near a cut comes to top_p or min_p: within rounding it may fall on either side.
    """
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    near = np.abs(p / p.max() - params.min_p).min() if params.min_p else 1.0
    p[p < params.min_p * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    if params.top_p < 1:
        near = min(near, np.abs(before - params.top_p)[p[order] > 0].min())
        p[order[before >= params.top_p]] = 0.0
    return p / p.sum(), near


def penalized(logits: np.ndarray, row: Row) -> np.ndarray:
    """The logits after bias, bans and penalties, token by token."""
    params, out = row.params, logits.astype(np.float64)
    output = row.token_ids[row.num_prompt_tokens :]
    for v in range(len(out)):
        out[v] += params.logit_bias.get(v, 0.0)
        if v in row.token_ids:
            out[v] = out[v] / params.repetition_penalty if out[v] > 0 else out[v] * params.repetition_penalty
        out[v] -= params.frequency_penalty * output.count(v) + params.presence_penalty * (v in output)
        banned = params.allowed_token_ids is not None and v not in params.allowed_token_ids
        if banned or (v in row.stop_ids and len(output) < params.min_tokens):
            out[v] = -np.inf
    return out


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"min_p": 0.2},
    {"top_k": 3},
    {"top_k": 4, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    {"top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.5, "frequency_penalty": 0.4, "logit_bias": {3: 1.0}},
    {"presence_penalty": 0.7, "min_tokens": 5, "temperature": 2.0},
    {"allowed_token_ids": (0, 3, 4, 6), "top_p": 0.9},
]


# Rows one by one take longer; that they draw what rows together draw, for any cuts, has a test of its own below.
@pytest.mark.parametrize(("cuts", "by_row", "num_seeds"), [((), True, 500), ((2, 5), False, 2500)])
@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_draws_agree_with_the_filtered_distribution(
    changes: dict[str, Any], cuts: tuple[int, ...], by_row: bool, num_seeds: int
) -> None:
    """Chi-square; with 7 degrees of freedom it exceeds 40 once in a million, and the seeds are fixed."""
    logits = np.random.default_rng(0).normal(0, 1, 8).astype(np.float32)
    rows = [Row([1, 5, 5, 3], seed=seed, **changes) for seed in range(num_seeds)]
    share, near = filtered(penalized(logits, rows[0]), rows[0].params)
    assert near > 1e-4
    sampler = RankedSampler(8, cuts=cuts, by_row=by_row)
    drawn = sampler.sample(torch.from_numpy(logits).expand(len(rows), 8), rows).token_ids
    counts, expected = np.bincount(drawn, minlength=8), share * len(rows)
    assert not counts[share == 0].any()
    kept = share > 0
    assert ((counts - expected)[kept] ** 2 / expected[kept]).sum() < 40


@pytest.mark.parametrize(
    "changes", [{}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 2}, {"temperature": 0.6, "top_p": 0.9}]
)
def test_every_noise_of_a_tiny_vocabulary(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All combinations of 18 quantiles of the noise of three tokens: the shares of the tokens are the distribution's."""
    quantiles = -np.log(-np.log((np.arange(18) + 0.5) / 18))
    table = torch.tensor(list(itertools.product(quantiles, repeat=3)))
    logits, row = np.array([0.3, 1.0, -0.5], np.float32), Row(**changes)

    def scores(logits: Tensor, ids: Tensor, temperature: Tensor, number: Tensor) -> Tensor:
        return logits.double() / temperature + table[number, ids.clamp(max=2)]

    monkeypatch.setattr(choose, "scores_of", scores)
    monkeypatch.setattr(choose, "steps_of", lambda ids: ids)
    sampler = RankedSampler(3, cuts=(1,), by_row=False)
    numbers = sampler.rows([Wanted(row)] * len(table)).table_RC.copy()
    numbers.view(np.int64)[:, Column.NOISE] = np.arange(len(table))
    monkeypatch.setattr(sampler, "rows", lambda wanted: SampleRows(numbers.tobytes()))
    drawn = sampler.sample(torch.from_numpy(logits).expand(len(table), 3), []).token_ids
    got, share = np.bincount(drawn, minlength=3) / len(table), filtered(logits, row.params)[0]
    assert np.abs(got - share).max() < 0.02 and not got[share == 0].any()


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    levels=st.sampled_from([3, 1000]),
    cuts=st.sets(st.integers(1, VOCAB - 1), max_size=3).map(sorted),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.99, 0.7, 0.2, 0.001]),
)
def test_the_token_has_the_best_score_of_those_that_the_filters_keep(
    seed: int, levels: int, cuts: list[int], **params: Any
) -> None:
    logits = np.random.default_rng(seed).integers(-levels, levels, VOCAB).astype(np.float32) * 3 / levels
    row = Row(seed=seed, **params)
    share, near = filtered(logits, row.params)
    assume(near > 1e-5)
    noise = np.array([reference_noise(seed, 1, v) for v in range(VOCAB)])
    scores = np.where(share > 0, logits / row.params.temperature + noise, -np.inf)
    best, second = np.sort(scores)[:-3:-1]
    assume(best - second > 1e-5)
    wanted = int(logits.argmax()) if top_k_is_one(row) else int(scores.argmax())
    assert RankedSampler(VOCAB, cuts=cuts).sample(torch.from_numpy(logits)[None], [row]).token_ids == [wanted]


def top_k_is_one(row: Row) -> bool:
    return row.params.top_k == 1


def random_row(chance: random.Random) -> Row:
    return Row(
        [chance.randrange(VOCAB) for _ in range(chance.randint(2, 9))],
        temperature=chance.choice([0.0, 0.5, 1.0, 6.0]),
        top_p=chance.choice([1.0, 0.9, 0.5]),
        top_k=chance.choice([0, 0, 1, 7, 80, 1000]),
        min_p=chance.choice([0.0, 0.0, 0.02]),
        seed=chance.randrange(1 << 62),
        presence_penalty=chance.choice([0.0, 1.0]),
        repetition_penalty=chance.choice([1.0, 1.3]),
        logit_bias=chance.choice([{}, {7: 4.0, 89: 3.0}]),
        logprobs=chance.choice([None, 0, 5, 88]),
        min_tokens=chance.choice([0, 2]),
        allowed_token_ids=chance.choice([None, None, tuple(chance.sample(range(VOCAB), 20))]),
        bad_words=banned_ids(*chance.choice([[], [(5,), (6,)], [(b,) for b in range(30)], [(4, 5), (7, 8, 9)]])),
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([2, 9, 1000]),
    cuts=st.sets(st.integers(1, VOCAB - 1), min_size=1, max_size=4).map(sorted),
)
def test_tokens_and_scores_are_those_of_one_rank(seed: int, levels: int, cuts: list[int]) -> None:
    """With few levels many logits are equal; the lowest ids come first for any cuts."""
    chance = random.Random(seed)
    logits = torch.randint(-levels, levels, (6, VOCAB), generator=torch.Generator().manual_seed(seed)) * 0.01
    wanted = [Wanted(random_row(chance)) for _ in range(4)] + [Wanted(Row(prompt_logprobs=3), [5, 80], samples=False)]
    alone = RankedSampler(VOCAB).answer(logits, wanted)
    split = RankedSampler(VOCAB, cuts=cuts).answer(logits, wanted)
    assert split.token_ids == alone.token_ids
    for got, same in zip(split.scores, alone.scores, strict=True):
        assert (got is None) == (same is None)
        if got is not None and same is not None:
            assert (got.token_id, got.rank, [i for i, _ in got.top]) == (
                same.token_id,
                same.rank,
                [i for i, _ in same.top],
            )
            assert [got.logprob, *(p for _, p in got.top)] == pytest.approx([same.logprob, *(p for _, p in same.top)])


@pytest.mark.parametrize("cut", [(), (45,)])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), float("inf")])
def test_rows_without_a_finite_best_have_no_token(odd: float, params: dict[str, Any], cut: tuple[int, ...]) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 60], logits[2] = odd, -torch.inf
    sampled = RankedSampler(VOCAB, cuts=cut).sample(logits, [Row(**params) for _ in range(3)])
    assert sampled.token_ids[0] >= 0 and sampled.token_ids[1:] == [-1, -1]


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 50], logits[0, 20] = 0.0, -0.0
    assert RankedSampler(VOCAB, cuts=(45,)).sample(logits, [Row(temperature=0.0)]).token_ids == [20]


@pytest.mark.parametrize(
    ("params", "messages"),
    [
        ({"temperature": 0.0}, [8]),
        ({}, [8]),
        ({"frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "min_tokens": 9, "bad_words": banned_ids((5,))}, [8]),
        ({"min_p": 0.1}, [8 * FRONT]),
        ({"top_p": 0.9, "temperature": 99.0}, [8 * FRONT, 8 * (FRONT + 1)]),  # no row draws its best token
        ({"top_k": 7, "top_p": 0.9}, [8 * 7]),
        ({"top_k": 60}, [8 * 50]),  # no rank has more columns
        ({"logprobs": 0}, [8, 8 * 3, 8]),
        ({"logprobs": 5, "top_p": 0.9, "temperature": 99.0}, [8 * FRONT, 8 * (FRONT + 1), 8 * 8, 8]),
    ],
    ids=str,
)
def test_messages_have_the_bytes_of_the_formula(params: dict[str, Any], messages: list[int]) -> None:
    sampler = RankedSampler(VOCAB, cuts=(40,))
    logits = torch.arange(3.0 * VOCAB).view(3, VOCAB)
    sampler.sample(logits, [Row(seed=seed, **params) for seed in range(3)])
    assert sampler.gather.message_bytes == [3 * each for each in messages]


@pytest.mark.parametrize("by_row", [True, False])
def test_rows_of_all_kinds_take_one_message(by_row: bool) -> None:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 5}, {"min_p": 0.1}]
    sampler = RankedSampler(300, cuts=(100,), by_row=by_row)
    sampler.sample(torch.randn(4, 300), [Row(seed=seed, **each) for seed, each in enumerate(kinds)])
    assert sampler.gather.message_bytes == [8 * (1 + 1 + 5 + FRONT)]


def test_masses_are_told_only_where_a_token_is_before_the_best() -> None:
    sampler, logits = RankedSampler(VOCAB, cuts=(40,)), torch.arange(float(VOCAB)).expand(3, VOCAB)
    rows = [Row(seed=seed, top_p=0.9, temperature=temperature) for seed, temperature in enumerate((0.01, 99.0, 0.01))]
    assert sampler.sample(logits, rows).token_ids[::2] == [VOCAB - 1, VOCAB - 1]
    assert sampler.gather.message_bytes == [3 * 8 * FRONT, 8 * (FRONT + 1)]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    levels=st.sampled_from([1, 1000]),
    cuts=st.sets(st.integers(1, 2999), max_size=2).map(sorted),
)
def test_one_row_on_a_cpu_draws_what_rows_together_draw(seed: int, spread: float, levels: int, cuts: list[int]) -> None:
    """Where few columns can win and where all can, with equal logits, banned tokens, and a best one that is not finite."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    logits = (torch.randn(4, 3000, generator=generator) * spread * levels).round() / levels
    logits[1, chance.randrange(3000)] += 40.0
    logits[2, chance.randrange(3000) :] = -torch.inf
    logits[3, chance.randrange(3000)] = chance.choice([torch.nan, torch.inf, -torch.inf, 0.0])
    rows = [
        Row(
            seed=chance.randrange(1 << 62),
            temperature=chance.choice([0.01, 0.7, 1.0, 4.0]),
            top_p=chance.choice([1.0, 0.9, 0.3]),
            min_p=chance.choice([0.0, 0.02]),
        )
        for _ in range(4)
    ]
    by_row, together = (RankedSampler(3000, cuts=cuts, by_row=by_row).sample(logits, rows) for by_row in (True, False))
    assert by_row.token_ids == together.token_ids


def test_prompts_are_scored_without_a_draw() -> None:
    sampler = RankedSampler(VOCAB, cuts=(40,))
    logits, row = torch.randn(4, VOCAB), Row([5, 9, 3, 70, 8], prompt_logprobs=2)
    row.num_prompt_tokens = 5
    scores = sampler.answer(logits, [Wanted(row, [9, 3, 70, 8], samples=False)]).scores
    exact = logits.log_softmax(-1)
    assert [score and score.logprob for score in scores] == pytest.approx(
        exact[range(4), [9, 3, 70, 8]].tolist(), abs=1e-5
    )
    assert sampler.gather.message_bytes == [4 * 8 * 5, 4 * 8]


def test_rows_beside_scored_prompts_are_chosen_as_alone() -> None:
    logits, prompt = torch.randn(8, VOCAB), Row([5, 9, 3, 70, 8], prompt_logprobs=2)
    prompt.num_prompt_tokens = 5
    edited = {"seed": 4, "logit_bias": {7: 3.0}, "bad_words": banned_ids((int(logits[3].argmax()),))}
    penalized, greedy = {"seed": 5, "presence_penalty": 2.0, "logprobs": 1}, {"temperature": 0.0, "min_tokens": 9}
    rows = [Row([1, 2], **params) for params in (edited, penalized, greedy)]
    wanted = [Wanted(prompt, [9, 3], samples=False), *map(Wanted, rows), Wanted(prompt, [70, 8, 1], samples=False)]
    together = RankedSampler(VOCAB, cuts=(40,)).answer(logits, wanted)
    for place, params in enumerate((edited, penalized, greedy), start=2):
        alone = RankedSampler(VOCAB).sample(logits[place : place + 1], [Row([1, 2], **params)])
        assert (alone.token_ids, alone.scores) == (
            together.token_ids[place : place + 1],
            together.scores[place : place + 1],
        )


def test_each_row_of_a_draft_is_chosen_as_if_the_draft_were_the_text() -> None:
    logits = torch.randn(4, VOCAB)
    params = {
        "seed": 4,
        "presence_penalty": 2.0,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "bad_words": banned_ids((7, 8)),
    }
    together = RankedSampler(VOCAB, cuts=(40,)).answer(logits, [Wanted(Row([1, 2], **params), draft=[7, 8, 9])])
    for place, text in enumerate([[1, 2], [1, 2, 7], [1, 2, 7, 8], [1, 2, 7, 8, 9]]):
        alone = RankedSampler(VOCAB).sample(logits[place : place + 1], [Row(text, **params)])
        assert alone.token_ids == together.token_ids[place : place + 1]
