"""The columns of a row that can win are found among many, in pieces, whatever the token id of the first."""

import numpy as np
import pytest
import torch
from helpers.model.ranked_sampling import reference_noise

from tightwire.model.sampling.draw import hashed, mix_seed, scores_of, steps_of
from tightwire.model.sampling.host_draw import near_columns


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("first_id", [0, 90_001])
def test_near_columns_have_the_whole_front_and_are_few(spread: float, first_id: int) -> None:
    """A front's tokens, by their definition: no other has both a larger logit and a larger score."""
    logits = np.random.default_rng(first_id).normal(0, spread, 70_000).astype(np.float32)
    ids = torch.arange(first_id, first_id + len(logits))
    noise = int(hashed(np.array([mix_seed(7)]) + steps_of(np.array([3])))[0])
    columns = near_columns(logits, first_id, noise)
    temperature, noise_1 = torch.ones(1, dtype=torch.float64), torch.tensor([noise])
    scores = scores_of(torch.from_numpy(logits), steps_of(ids), temperature, noise_1).numpy()
    best = int(scores.argmax())
    assert scores[best] - float(logits[best]) == pytest.approx(reference_noise(7, 3, first_id + best), abs=1e-5)
    order = np.argsort(-logits, kind="stable")
    before = np.maximum.accumulate(np.concatenate([[-np.inf], scores[order][:-1]]))
    front = order[scores[order] > before]
    assert best in front and {*front.tolist()} <= {*columns.tolist()} and len(columns) < 4000


@pytest.mark.parametrize("allowed", [[], [3], [3, 40_000]])
def test_columns_without_a_finite_logit_are_few(allowed: list[int]) -> None:
    logits = np.full(50_000, -np.inf, np.float32)
    logits[allowed] = 1.0
    columns = near_columns(logits, 0, 12345)
    assert {*allowed} <= {*columns.tolist()} and 0 < len(columns) < 1000
