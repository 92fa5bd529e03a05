"""The noise of draws is Gumbel's, by hash; the front is what brute force finds."""

import numpy as np
import pytest
import torch
from helpers.model.ranked_sampling import reference_noise
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.kernels.best_number import keys_of
from tightwire.model.sampling.draw import (
    FRONT,
    front_of_sorted,
    hashed,
    largest_keys,
    logits_and_ids,
    mix_seed,
    padded,
    scores_of,
    steps_of,
)


def stream_of(seed: int, position: int) -> torch.Tensor:
    return torch.from_numpy(hashed(np.array([[mix_seed(seed)]]) + steps_of(np.array([[position]]))))


def noise(seed: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    return scores_of(torch.zeros(1, len(ids)), steps_of(ids), torch.ones(1, 1), stream_of(seed, position))[0]


def test_the_hash_is_splitmix64() -> None:
    """First outputs of the reference implementation for seed 1234567 (S. Vigna, splitmix64.c), in arrays and tensors."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = 1234567 + steps_of(np.arange(3))
    assert hashed(states).view(np.uint64).tolist() == published
    assert hashed(torch.from_numpy(states)).numpy().view(np.uint64).tolist() == published


@given(seed=st.integers(-(2**63), 2**64), position=st.integers(0, 2**31), token_id=st.integers(0, 2**20))
def test_noise_is_that_of_seed_position_and_token(seed: int, position: int, token_id: int) -> None:
    """Up to the rounding of a uniform number to float32, which the noise of one near 1 magnifies."""
    got, wanted = noise(seed, position, torch.tensor([token_id])).item(), reference_noise(seed, position, token_id)
    rate = np.exp(-wanted)  # -log(1 - uniform)
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6 + 2.0**-24 * np.expm1(rate) / rate)


def test_noise_is_that_of_the_id_wherever_its_column_is() -> None:
    whole = noise(5, 9, torch.arange(5000))
    assert torch.equal(torch.cat([noise(5, 9, part) for part in torch.arange(5000).split([1, 13, 2500, 2486])]), whole)


@pytest.mark.parametrize("along", ["seeds", "positions", "ids"])
def test_noise_is_gumbels_and_uncorrelated(along: str) -> None:
    n = 20000
    if along == "ids":
        got = noise(5, 3, torch.arange(n)).numpy()
    else:
        seeds = [mix_seed(s if along == "seeds" else 5) for s in range(n)]
        positions = np.arange(n) if along == "positions" else np.full(n, 3)
        streams_R1 = torch.from_numpy(hashed(np.array(seeds) + steps_of(positions)))[:, None]
        got = scores_of(torch.zeros(n, 1), steps_of(torch.tensor([7])), torch.ones(n, 1), streams_R1)[:, 0].numpy()
        assert got[9] == noise(9 if along == "seeds" else 5, 9 if along == "positions" else 3, torch.tensor([7])).item()
    uniform = np.exp(-np.exp(-got))
    counts = np.bincount((uniform * 50).astype(int), minlength=50)
    assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 110  # chi-square, 49 degrees of freedom: p = 1e-6
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 5 / np.sqrt(n)


def test_the_smallest_and_the_largest_hash_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, wanted in [(0, 44.36), (-1, -2.81)]:  # 2^-64 and 1 - 2^-24 as uniform numbers
        monkeypatch.setattr("tightwire.model.sampling.draw.hashed", lambda x, bits=bits: x * 0 + bits)
        assert noise(0, 0, torch.arange(3)).tolist() == pytest.approx([wanted] * 3, abs=0.01)


def front(logits: np.ndarray, scores: np.ndarray) -> list[int]:
    """Ids that no other beats both in logit (of equal ones, the lower id) and in score; best score first."""
    ids = range(len(logits))
    kept = [
        i for i in ids if not any((logits[j], -j) > (logits[i], -i) and scores[j] >= scores[i] and j != i for j in ids)
    ]
    return sorted(kept, key=lambda i: -scores[i])


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(1, 80), levels=st.sampled_from([1, 3, 1000]))
def test_the_front_is_what_no_token_beats_twice(seed: int, vocab: int, levels: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.integers(0, levels, vocab).astype(np.float32)
    scores = logits + random.gumbel(size=vocab)
    wanted = front(logits, scores)
    logits_1V, scores_1V = torch.from_numpy(logits)[None], torch.from_numpy(scores)[None]
    keys, order = keys_of(logits_1V, torch.arange(100, 100 + vocab)).sort(1, descending=True)
    logits_C, ids_C = logits_and_ids(front_of_sorted(keys, scores_1V.gather(1, order)))
    assert ids_C[0, : len(wanted)].tolist() == [100 + i for i in wanted]
    assert ids_C.shape == (1, FRONT) and not logits_C[0, len(wanted) :].isfinite().any()


def test_a_larger_front_keeps_the_best_scores_and_the_best_logit() -> None:
    logits, scores = torch.arange(50.0)[None], torch.arange(50.0, 0.0, -1.0)[None].double()
    wanted = [*range(FRONT - 1), 49]
    keys = keys_of(logits, torch.arange(50)).flip(1)
    assert logits_and_ids(front_of_sorted(keys, scores.flip(1)))[1].tolist() == [wanted]


def test_keys_of_no_token_sort_behind_all_others() -> None:
    keys = padded(keys_of(torch.tensor([[-torch.inf, -3.0, -0.0]]), torch.arange(3)), 5)
    assert logits_and_ids(largest_keys(keys, 3))[1].tolist() == [[2, 1, 0]]
    assert logits_and_ids(largest_keys(keys, 9))[0].tolist() == [[0.0, -3.0] + [-torch.inf] * 3]
