"""Signal to noise of the legs, against the textbook numbers for Gaussian data and against a direct computation."""

from pathlib import Path

import pytest
import torch
from harness import run_in_process
from tiny import make_tiny

from tightwire.bench.quality.arms import exact_arm
from tightwire.bench.quality.noise import NoiseRecord, Power, sqnr_db
from tightwire.bench.quality.ranks import ThreadRanks
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.model.open import open_checkpoint


def _sum_gaussians(group: Group, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    x_N = torch.randn(1 << 15, generator=torch.Generator().manual_seed(group.rank))
    return x_N, make_all_reduce("two-shot", group)(x_N), {name: make_all_reduce(name, group)(x_N) for name in names}


def test_legs_on_gaussian_numbers() -> None:
    names = ("flash-int8", "flash-int4", "flash-int6", "flash:int4,none", "two-shot")
    ranks = run_in_process(4, _sum_gaussians, names)
    record = NoiseRecord(4, names)

    record.add("o_proj", 0, [x for x, _, _ in ranks], ranks[0][1], ranks[0][2])

    found = {name: record.powers[name, "o_proj", 0] for name in names}
    db = {
        name: {leg: sqnr_db(power.signal, getattr(power, leg)) for leg in ("total", "reduce", "gather")}
        for name, power in found.items()
    }
    # One pass of int8-g128 has 44.5 dB, int4-g128 20.0 dB; two in a row 3 dB less.
    assert db["flash-int8"] == pytest.approx({"total": 41.5, "reduce": 44.5, "gather": 44.5}, abs=0.3)
    assert db["flash-int4"] == pytest.approx({"total": 17.0, "reduce": 20.0, "gather": 20.0}, abs=0.3)
    assert db["flash-int6"] == pytest.approx({"total": 20.0, "reduce": 20.0, "gather": 44.5}, abs=0.3)
    assert db["flash:int4,none"]["gather"] == float("inf")
    assert db["two-shot"]["total"] == float("inf")


def test_every_place_of_a_model_is_watched_and_nothing_changes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path / "model")))
    names = ("flash-int8", "one-shot")
    prompts = torch.arange(2 * 32).view(2, 32)
    record = NoiseRecord(2, names)
    with ThreadRanks(checkpoint, 2, dtype=torch.float32, num_sequences=2, max_tokens=32) as ranks:
        ranks.set_arms([exact_arm()])
        plain = ranks.prefill(prompts, 0)
        ranks.set_arms([exact_arm()], record.routes)
        watched = ranks.prefill(prompts, 0)

    assert torch.equal(plain, watched)
    places = [(site, layer) for site in ("o_proj", "down_proj") for layer in range(2)]
    assert set(record.powers) == {(name, *place) for name in names for place in places}
    for place in places:
        assert record.powers["one-shot", *place].total == 0
        power = record.powers["flash-int8", *place]
        assert 30 < sqnr_db(power.signal, power.total) < 50
        # Errors of the legs are independent.
        assert power.total == pytest.approx(power.reduce + power.gather, rel=0.1)


def test_silence_has_no_signal() -> None:
    assert sqnr_db(0.0, 1.0) == float("-inf")
    assert Power().total == 0
