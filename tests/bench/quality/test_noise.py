"""Signal to noise of AllReduces on the messages of a model, against the textbook numbers for quantized Gaussian data."""

from pathlib import Path

import pytest
import torch
from harness import run_in_process
from tiny import make_tiny

from tightwire.bench.quality.arms import exact_arm
from tightwire.bench.quality.noise import NoiseRoutes, Powers, sqnr_db
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.comm.group.group import Group
from tightwire.model.open import open_checkpoint


def _sum_gaussians(group: Group, names: tuple[str, ...]) -> Powers:
    powers: Powers = {}
    routes = NoiseRoutes([exact_arm()], group, names, powers)
    x_N = torch.randn(1 << 15, generator=torch.Generator().manual_seed(group.rank))
    routes.all_reduce("o_proj", 0, "prefill")(x_N)
    return powers


def test_noise_on_gaussian_numbers() -> None:
    names = ("flash-int8", "flash-int4", "flash-int6", "two-shot")
    powers = run_in_process(4, _sum_gaussians, names)[0]

    db = {name: sqnr_db(powers[name, "o_proj", 0].signal, powers[name, "o_proj", 0].noise) for name in names}
    # One pass of int8-g128 has 44.5 dB, int4-g128 20.0 dB; two in a row 3 dB less.
    assert db == pytest.approx(
        {"flash-int8": 41.5, "flash-int4": 17.0, "flash-int6": 20.0, "two-shot": float("inf")}, abs=0.3
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
