"""KL, surprise and top-1 against their definitions in float64, also where two distributions all but agree."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tightwire.bench.quality.measure import score

ROWS, HIDDEN, VOCAB = 150, 24, 300


def _states(noise: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(ROWS, HIDDEN, generator=generator)
    return states + noise * torch.randn(ROWS, HIDDEN, generator=generator.manual_seed(seed + 1))


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0])
def test_scores_are_those_of_the_definition(noise: float) -> None:
    head_VD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    next_ids_T = torch.arange(ROWS) % VOCAB
    exact_TD, other_TD = _states(0, 0), _states(noise, 1)

    with ThreadPoolExecutor(2) as pool:
        scores = score(pool, head_VD, exact_TD, {"other": other_TD}, next_ids_T)

    log_p, log_q = (torch.log_softmax(x.double() @ head_VD.double().T, dim=1) for x in (exact_TD, other_TD))
    want_kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
    exact, got = scores["exact"], scores["other"]
    # KL is half the variance of the logits' differences, whose rounding to float32 is up to e: logits are up to 32.
    e = HIDDEN**0.5 * 32 * 2.0**-24
    assert ((torch.tensor(got.kl_T) - want_kl).abs() <= e * (2 * want_kl).sqrt() + e**2).all()
    for own, log in ((exact, log_p), (got, log_q)):
        assert own.nll_T == pytest.approx(-log[torch.arange(ROWS), next_ids_T].numpy(), abs=1e-5)
    assert got.same_top_T.tolist() == (log_p.argmax(1) == log_q.argmax(1)).double().tolist()
    assert exact.kl_T.max() == 0 and exact.same_top_T.min() == 1


def test_equal_states_have_no_distance() -> None:
    states_TD, next_ids_T = _states(0, 0), torch.zeros(ROWS, dtype=torch.int64)
    with ThreadPoolExecutor(1) as pool:
        scores = score(pool, torch.randn(VOCAB, HIDDEN), states_TD, {"same": states_TD.clone()}, next_ids_T)
    assert scores["same"].kl_T.max() == 0 and scores["same"].same_top_T.min() == 1
    assert scores["same"].nll_T.tolist() == scores["exact"].nll_T.tolist()
