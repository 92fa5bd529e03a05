"""KL, surprise and top-1 against their definitions in float64, also where two distributions all but agree."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import run_in_process
from tiny import make_tiny

from tightwire.bench.quality.measure import NoiseRoutes, Powers, score, sqnr_db
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.bench.quality.setting import exact_arm
from tightwire.comm.group.group import Group
from tightwire.model.open import open_checkpoint

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


def _sum_gaussians(group: Group, names: tuple[str, ...]) -> Powers:
    powers: Powers = {}
    routes = NoiseRoutes([exact_arm()], group, names, powers)
    x_N = torch.randn(1 << 15, generator=torch.Generator().manual_seed(group.rank))
    routes.all_reduce("o_proj", 0, "prefill")(x_N)
    return powers


def test_noise_on_gaussian_numbers() -> None:
    names = ("flash-int8-plain", "flash-int4-plain", "flash-int6-plain", "two-shot")
    powers = run_in_process(4, _sum_gaussians, names)[0]

    db = {name: sqnr_db(powers[name, "o_proj", 0].signal, powers[name, "o_proj", 0].noise) for name in names}
    # One pass of int8-g128 has 44.5 dB, int4-g128 20.0 dB; two in a row 3 dB less.
    assert db == pytest.approx(
        {"flash-int8-plain": 41.5, "flash-int4-plain": 17.0, "flash-int6-plain": 20.0, "two-shot": float("inf")},
        abs=0.3,
    )


def test_every_place_of_a_model_is_measured_and_nothing_changes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "model")))
    names = ("flash-int8", "one-shot")
    prompts = torch.arange(2 * 32).view(2, 32)
    powers: Powers = {}
    with ThreadRanks(checkpoint, 2, dtype=torch.float32, num_sequences=2, max_tokens=32) as ranks:
        ranks.set_arms([exact_arm()])
        plain = ranks.prefill(prompts, 0)
        ranks.set_arms([exact_arm()], lambda arms, group: NoiseRoutes(arms, group, names, powers))
        watched = ranks.prefill(prompts, 0)

    assert torch.equal(plain, watched)
    places = [(site, layer) for site in ("o_proj", "down_proj") for layer in range(2)]
    assert set(powers) == {(name, *place) for name in names for place in places}
    for place in places:
        assert powers["one-shot", *place].noise == 0
        power = powers["flash-int8", *place]
        assert 30 < sqnr_db(power.signal, power.noise) < 50


def test_noise_without_a_signal() -> None:
    assert sqnr_db(0.0, 1.0) == float("-inf")
