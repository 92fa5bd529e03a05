"""Where quantizing stops paying: both sides of the rate, and the cases that have none."""

import pytest

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.link.link import Link
from tightwire.comm.policy.cost import LINK_COSTS, CostModel, crossover_rate

_SHARED = Setting(transport="shared-memory", device="cpu", world_size=2, num_nodes=1, dtype="bfloat16")
_GLOO = Setting(transport="process-group", device="cpu", world_size=2, num_nodes=1, dtype="bfloat16")
_SIZE = 1 << 20


@pytest.mark.parametrize("lossy", ["flash-int8", "flash-int4", "flash-int6"])
def test_below_it_fewer_bytes_win_and_above_it_they_lose(lossy: str) -> None:
    rate = crossover_rate(_SHARED, "two-shot", lossy, _SIZE)
    assert rate is not None
    for factor, wins in ((0.95, True), (1.05, False)):
        costs = CostModel(_SHARED, None, Link("", factor * rate))
        assert (costs.modelled_us(lossy, _SIZE) < costs.modelled_us("two-shot", _SIZE)) is wins


def test_it_is_saved_bytes_over_the_time_that_coding_adds() -> None:
    costs, link = CostModel(_SHARED), LINK_COSTS["shared-memory", "cpu"]
    saved = costs.wire_bytes("two-shot", _SIZE) - costs.wire_bytes("flash-int8", _SIZE)
    elems = _SIZE / 2 / (1 << 20)
    coding_us = link.coded_call + elems * (1.5 * link.encode_melem + 2 * link.decode_melem)
    adding_us = elems * LINK_COSTS["process-group", "cpu"].sum_melem
    assert crossover_rate(_SHARED, "two-shot", "flash-int8", _SIZE) == pytest.approx(
        saved / (coding_us - adding_us) * 1e6, rel=1e-3
    )


def test_there_is_none_where_the_transport_is_slow_itself_or_nothing_is_saved() -> None:
    assert crossover_rate(_GLOO, "two-shot", "flash-int4", 64 << 20) is None  # pays however fast the link is
    assert crossover_rate(_SHARED, "two-shot", "ring", _SIZE) is None  # sends as much


def test_a_latency_that_both_wait_for_changes_nothing() -> None:
    without = crossover_rate(_SHARED, "two-shot", "flash-int8", _SIZE)
    assert crossover_rate(_SHARED, "two-shot", "flash-int8", _SIZE, latency_s=1e-3) == pytest.approx(without)


def test_computing_that_takes_longer_is_made_up_for_on_slower_links_only() -> None:
    seeds = crossover_rate(_SHARED, "two-shot", "flash-int8", _SIZE)
    computing = {"two-shot": [(_SIZE, 100.0)], "flash-int8": [(_SIZE, 1100.0)]}
    slower = crossover_rate(_SHARED, "two-shot", "flash-int8", _SIZE, computing=computing)
    assert seeds is not None and slower is not None
    costs = CostModel(_SHARED)
    saved_bytes = costs.wire_bytes("two-shot", _SIZE) - costs.wire_bytes("flash-int8", _SIZE)
    assert slower == pytest.approx(saved_bytes / 1000e-6, rel=1e-3)
