import math

import pytest
import torch
from harness import run_in_process

from tightwire.bench.quality.compared import compared, make_any
from tightwire.bench.quality.options import check_name
from tightwire.comm.group.group import Group

ROWS, ROW_ELEMS = 32, 576


def _parts(world_size: int) -> list[torch.Tensor]:
    return list(torch.randn(world_size, ROWS, ROW_ELEMS, generator=torch.Generator().manual_seed(1)))


def _sum(group: Group, name: str) -> torch.Tensor:
    return make_any(name, group)(_parts(group.world_size)[group.rank])


@pytest.mark.parametrize(
    ("name", "bits", "db"),
    [
        ("spec:amd-int6", 6.5, 30.1),
        ("spec:amd-int6-rows", 6.5 + 8 / ROW_ELEMS, 30.1),
        ("spec:amd-int4", 4.5, 19.2),
        # The largest of 576 Gaussians has a mean square of 10.2; a leg has a noise of 10.2 / (12 L^2).
        ("spec:uniform-int8", 8 + 16 / ROW_ELEMS, 39.7),
        ("spec:uniform-int4", 4 + 16 / ROW_ELEMS, 14.6),
        ("spec:ring-int4", 4.25, 18.2),  # encodes one part and the sum: 3 units of noise, flash 4
        ("two-shot", 32, math.inf),
    ],
)
def test_sums_have_the_noise_and_the_bytes_of_the_format(name: str, bits: float, db: float) -> None:
    check_name(name)
    results = run_in_process(2, _sum, name)
    assert torch.equal(*results)
    exact = torch.stack(_parts(2)).sum(0)
    noise = float((results[0] - exact).square().sum())
    assert db == math.inf or 10 * math.log10(float(exact.square().sum()) / noise) == pytest.approx(db, abs=0.3)
    if name != "two-shot":
        assert compared(name).row_bytes(ROW_ELEMS, 4) == pytest.approx(1.5 * ROW_ELEMS * bits / 8)


def test_an_exponent_for_each_row_keeps_numbers_beyond_amds_range() -> None:
    x = torch.randn(4, ROW_ELEMS, generator=torch.Generator().manual_seed(2))
    x[1, 7], x[2] = 24_809.0, x[2] * 1e-4
    for name, worst in (("spec:amd-int6", 1.0), ("spec:amd-int6-rows", 0.07)):
        error = (compared(name).through(x) - x).abs()
        relative = error.amax(1) / x.abs().amax(1)
        assert (relative.max() < worst) and (relative.max() > 0.9) == (worst == 1.0)


def test_a_quantized_ring_encodes_a_part_once_for_each_rank_after_it() -> None:
    exact = torch.stack(_parts(8)).sum(0)
    noise = {
        name: float((run_in_process(8, _sum, name)[0] - exact).square().sum())
        for name in ("spec:ring-int4", "flash-int4-plain")
    }
    # Hop k encodes a sum of k parts, and the result is one of 8: 1 + ... + 8 = 36 units of noise against 8 + 8.
    assert noise["spec:ring-int4"] / noise["flash-int4-plain"] == pytest.approx(36 / 16, rel=0.05)


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="spec:amd-int5' is not a format to compare with; use spec:amd-int6"):
        check_name("spec:amd-int5")
