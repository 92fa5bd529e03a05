import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from helpers.model.ranked_sampling import RankedSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import banned_ids
from torch import Tensor

from tightwire.model.sampling.draw import ALL_BANNED, NOT_FINITE
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Sampler, Wanted

STOP = 2


@dataclass(eq=False)
class Row:
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset({STOP})
    token_ids: list[int] = field(default_factory=lambda: [4, 5, 6])
    num_prompt_tokens: int = 3


def row(**kw: Any) -> Row:
    return Row(SamplingParams(**({"max_tokens": 99, "temperature": 0.0} | kw)))


def logits_of(seed: int, rows: int, vocab: int, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device; the CPU twin of this test checks the same")
    return request.param


def test_greedy_takes_the_largest_logit_with_the_lowest_id(device: str) -> None:
    logits = logits_of(0, 3, 5000)
    logits[1, [4000, 77, 999]] = 50.0
    logits[2] = 0.0
    sampled = RankedSampler(5000, device).sample(logits.to(device), [row(), row(), row()])
    assert sampled.token_ids == [int(logits[0].argmax()), 77, 0]
    assert sampled.scores == [None] * 3


@pytest.mark.parametrize("kw", [{"temperature": 1e-6}, {"temperature": 1e-30}, {"temperature": 1.0, "top_k": 1}])
def test_other_greedy_parameters(kw: dict[str, Any]) -> None:
    logits = logits_of(1, 1, 50)
    logits[0, [40, 9]] = 20.0
    assert RankedSampler(50).sample(logits, [row(**kw)]).token_ids == [9]


def test_order_is_bias_then_bans_then_penalties() -> None:
    """Every stage changes the result here, so another order gives another token."""
    logits = torch.tensor([[0.0, 0.0, 9.0, 4.0, 3.0, 1.0]])
    first = row(logit_bias={STOP: 50.0, 3: -3.5}, min_tokens=1, repetition_penalty=4.0)
    # 2 banned in spite of its bias; 3: 0.5; 4 in the prompt: 3 / 4 = 0.75; 5 in the prompt: (1 + 0) / 4
    assert RankedSampler(6).sample(logits, [Row(first.params, token_ids=[4, 5, 5])]).token_ids == [4]
    # a bias of 8 on the penalized 5 is scaled with it: (1 + 8) / 4 = 2.25
    biased = row(logit_bias={5: 8.0, 3: -3.5}, min_tokens=1, repetition_penalty=4.0)
    assert RankedSampler(6).sample(logits, [Row(biased.params, token_ids=[4, 5, 5])]).token_ids == [5]


def test_min_tokens_ends_after_that_many() -> None:
    logits, r, sampler = torch.tensor([[0.0, 1.0, 9.0, 2.0]]), row(min_tokens=2), RankedSampler(4)
    got = []
    for _ in range(3):
        (token_id,) = sampler.sample(logits, [r]).token_ids
        r.token_ids.append(token_id)
        got.append(token_id)
    assert got == [3, 3, STOP]


def banned_by_vllm(words: tuple[tuple[int, ...], ...], output: list[int]) -> set[int]:
    """The rule of vLLM (``vllm/v1/sample/ops/bad_words.py``)."""
    banned = set()
    for word in words:
        prefix = len(word) - 1
        if prefix <= len(output) and (prefix == 0 or output[-prefix:] == list(word[:prefix])):
            banned.add(word[-1])
    return banned


@settings(max_examples=60)
@given(
    words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    allowed=st.none() | st.lists(st.integers(0, 5), min_size=1).map(tuple),
    output=st.lists(st.integers(0, 5), max_size=6),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_bans_are_those_of_vllm(
    words: tuple[tuple[int, ...], ...], allowed: tuple[int, ...] | None, output: list[int], temperature: float
) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    held = row(bad_words=banned_ids(*words), allowed_token_ids=allowed, temperature=temperature, top_k=1)
    held.token_ids += output
    free = [i for i in range(6) if (allowed is None or i in allowed) and i not in banned_by_vllm(words, output)]
    company = row()  # its neighbour is not affected
    got = RankedSampler(6).sample(logits.repeat(2, 1), [held, company])
    assert got.token_ids == [free[0] if free else ALL_BANNED, 0]


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("kw", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"top_k": 3}], ids=str)
def test_rows_whose_logits_are_not_finite_differ_from_rows_with_all_tokens_banned(
    kw: dict[str, Any], by_row: bool
) -> None:
    logits = logits_of(7, 3, 300)
    logits[0, 17], logits[1, 17] = float("nan"), float("inf")
    masked = row(bad_words=banned_ids((5,)), **kw)
    sampled = RankedSampler(300, by_row=by_row).sample(logits, [masked, masked, row(allowed_token_ids=(), **kw)])
    assert sampled.token_ids == [NOT_FINITE, NOT_FINITE, ALL_BANNED]


def test_logits_are_not_modified(device: str) -> None:
    logits = logits_of(2, 2, 100).to(device)
    before = logits.clone()
    rows = [
        row(logit_bias={5: 9.0}, min_tokens=3, presence_penalty=1.0, temperature=1.0),
        row(top_p=0.5, temperature=1),
    ]
    RankedSampler(100, device).sample(logits, rows)
    assert torch.equal(logits, before)


def random_row(rng: random.Random, vocab: int) -> Row:
    return Row(
        SamplingParams(
            max_tokens=99,
            temperature=rng.choice([0.0, 0.5, 1.0, 6.0]),
            top_p=rng.choice([1.0, 0.9, 0.5]),
            top_k=rng.choice([0, 1, 40, 1500]),
            min_p=rng.choice([0.0, 0.0, 0.02]),
            seed=rng.randrange(1 << 62),
            presence_penalty=rng.choice([0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            logit_bias=rng.choice([{}, {7: 4.0}]),
            logprobs=rng.choice([None, 0, 5]),
            min_tokens=rng.choice([0, 2]),
            allowed_token_ids=rng.choice([None, None, tuple(rng.sample(range(vocab), 40))]),
            bad_words=banned_ids(*rng.choice([[], [(5,), (6,)], [(b,) for b in range(30)], [(4, 5), (7, 8, 9)]])),
        ),
        token_ids=[rng.randrange(vocab) for _ in range(rng.randint(1, 9))],
        num_prompt_tokens=1,
    )


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(2, 24))
def test_results_do_not_depend_on_the_batch(seed: int, num_rows: int) -> None:
    check_batch_independence(seed, num_rows, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_results_do_not_depend_on_the_batch_cuda(seed: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device; the test above checks the same on the CPU")
    check_batch_independence(seed, 20, "cuda")


def check_batch_independence(seed: int, num_rows: int, device: str) -> None:
    """Tokens, logprobs and ranks are bit-identical alone, all together, and in random batches."""
    vocab, rng = 4999, random.Random(seed)
    rows = [random_row(rng, vocab) for _ in range(num_rows)]
    logits = logits_of(seed % 1000, num_rows, vocab, spread=rng.choice([0.2, 3.0])).to(device)
    alone = [RankedSampler(vocab, device).sample(logits[r : r + 1], [rows[r]]) for r in range(num_rows)]
    sampler = RankedSampler(vocab, device)
    for _ in range(4):
        company = rng.sample(range(num_rows), rng.randint(1, num_rows))
        got = sampler.sample(logits[company], [rows[r] for r in company])
        assert got.token_ids == [alone[r].token_ids[0] for r in company]
        assert got.scores == [alone[r].scores[0] for r in company]
    everyone = sampler.sample(logits, rows)
    assert everyone.token_ids == [one.token_ids[0] for one in alone]


def test_seed_and_position_decide() -> None:
    logits, sampler = logits_of(3, 1, 500), RankedSampler(500)

    def draw(seed: int, num_output: int) -> int:
        r = row(temperature=1.0, seed=seed)
        r.token_ids += [9] * num_output
        return sampler.sample(logits, [r]).token_ids[0]

    assert [draw(5, n) for n in range(8)] == [draw(5, n) for n in range(8)]
    assert len({draw(5, n) for n in range(8)}) > 4 and len({draw(s, 0) for s in range(8)}) > 4
    assert draw(-1, 0) == draw(2**64 - 1, 0)  # any integer is a seed


def test_draws_of_one_seed_agree_with_the_distribution() -> None:
    """One request of 2500 tokens: chi-square below what 7 degrees of freedom exceed once in a million."""
    logits, sampler, r = logits_of(4, 1, 8, spread=1.0), RankedSampler(8), row(temperature=0.8, seed=11)
    counts = np.zeros(8)
    for _ in range(2500):
        (token_id,) = sampler.sample(logits, [r]).token_ids
        counts[token_id] += 1
        r.token_ids.append(token_id)
    expected = (logits[0] / 0.8).softmax(-1).numpy() * 2500
    assert ((counts - expected) ** 2 / expected).sum() < 40


def test_scores_of_the_chosen_token_before_any_processing() -> None:
    logits = logits_of(5, 3, 200)
    rows = [row(), row(logprobs=3, logit_bias={50: 99.0}), row(logprobs=0, temperature=1.0, seed=4)]
    sampled = RankedSampler(200).sample(logits, rows)
    first, second, third = sampled.scores
    assert first is None and second is not None and third is not None
    exact = logits.log_softmax(-1)
    assert second.token_id == sampled.token_ids[1] == 50
    assert second.logprob == pytest.approx(float(exact[1, 50]), abs=1e-6)
    assert second.rank == int((logits[1] > logits[1, 50]).sum()) + 1
    assert [token_id for token_id, _ in second.top] == logits[1].topk(3).indices.tolist()
    assert third.top == [] and third.token_id == sampled.token_ids[2]


def test_score_of_given_targets() -> None:
    logits = logits_of(6, 130, 90)
    targets = [r % 90 for r in range(130)]
    prompt = [0, *targets]
    sampler, held = RankedSampler(90), Row(SamplingParams(max_tokens=0, prompt_logprobs=2), token_ids=prompt)
    scores = [score for score in sampler.answer(logits, [Wanted(held, targets, samples=False)]).scores if score]
    exact = logits.log_softmax(-1)
    assert [s.token_id for s in scores] == targets
    assert [s.logprob for s in scores] == pytest.approx(exact[range(130), targets].tolist(), abs=1e-6)
    assert all(len(s.top) == 2 for s in scores)


@pytest.mark.parametrize("kw", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 2}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_rows_are_reported_and_affect_no_other_row(kw: dict[str, Any], bad: float) -> None:
    logits = logits_of(7, 2, 300)
    logits[0, 17] = bad
    sampled = RankedSampler(300).sample(logits, [row(**kw), row()])
    assert sampled.token_ids == [-1, int(logits[1].argmax())]


def test_parameters_beyond_the_vocabulary_are_harmless() -> None:
    logits = logits_of(8, 1, 10)
    wide = RankedSampler(10).sample(logits, [row(temperature=1.0, seed=1, top_k=2**70, logprobs=50)])
    assert wide.token_ids == RankedSampler(10).sample(logits, [row(temperature=1.0, seed=1)]).token_ids
    assert wide.scores[0] is not None and len(wide.scores[0].top) == 10


def test_release_forgets() -> None:
    sampler, r = RankedSampler(20), row(presence_penalty=1.0)
    sampler.sample(logits_of(9, 1, 20), [r])
    assert len(sampler._states) == 1
    sampler.release(r)
    sampler.release(r)
    assert len(sampler._states) == 0


def test_wrong_shapes_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected logits \(1, 20\), got \(2, 20\)"):
        RankedSampler(20).sample(torch.zeros(2, 20), [row()])
    with pytest.raises(ValueError, match="vocabularies of 1 to 1048576 tokens, got 2000000"):
        Sampler(2_000_000)


VOCAB = 12


def penalized_row(prompt: list[int], output: list[int], **kw: Any) -> Row:
    return Row(SamplingParams(max_tokens=99, **kw), token_ids=prompt + output, num_prompt_tokens=len(prompt))


def reference(logits: np.ndarray, r: Row) -> np.ndarray:
    """Token by token."""
    out, output = logits.astype(np.float64), r.token_ids[r.num_prompt_tokens :]
    for v in range(len(logits)):
        if v in r.token_ids:
            out[v] = out[v] / r.params.repetition_penalty if out[v] > 0 else out[v] * r.params.repetition_penalty
        out[v] -= r.params.frequency_penalty * output.count(v) + r.params.presence_penalty * (v in output)
    return out


_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=20)
_penalty = st.sampled_from([-2.0, 0.0, 0.3, 2.0])


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(_tokens, _tokens, _penalty, _penalty, st.sampled_from([0.5, 1.0, 1.7])), min_size=1, max_size=11
    ),
    seed=st.integers(0, 1000),
)
def test_against_token_by_token(rows: list[tuple[list[int], list[int], float, float, float]], seed: int) -> None:
    sampler = RankedSampler(VOCAB)
    held = [
        penalized_row(prompt, output, presence_penalty=p, frequency_penalty=f, repetition_penalty=r)
        for prompt, output, p, f, r in rows
    ]
    logits = torch.randn(len(held), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    wanted = [reference(logits[i].numpy(), r) for i, r in enumerate(held)]
    edited(sampler, logits, held)  # asking again must not count again
    np.testing.assert_allclose(edited(sampler, logits, held).numpy(), np.stack(wanted), atol=1e-5)


def edited(sampler: RankedSampler, logits: Tensor, rows: list[Row]) -> Tensor:
    """The logits after bias, bans and penalties."""
    (chooser,) = sampler.choosers
    return chooser._edited(logits, sampler.rows([Wanted(r) for r in rows]), np.arange(len(rows)), b"")


def test_new_tokens_are_counted() -> None:
    sampler = RankedSampler(VOCAB)
    r = penalized_row([1, 2], [], frequency_penalty=1.0)
    for token_id, count in [(3, 1.0), (3, 2.0), (1, 1.0), (3, 3.0)]:
        r.token_ids.append(token_id)
        logits = edited(sampler, torch.zeros(1, VOCAB), [r])
        assert logits[0, token_id] == -count
    assert logits[0].tolist() == [0, -1, 0, -3] + [0] * 8  # the prompt's own 1 and 2 do not count


def test_has_penalties() -> None:
    assert not SamplingParams(max_tokens=1).has_penalties
    assert SamplingParams(max_tokens=1, presence_penalty=-1.0).has_penalties
    assert SamplingParams(max_tokens=1, frequency_penalty=0.1).has_penalties
    assert SamplingParams(max_tokens=1, repetition_penalty=1.1).has_penalties
