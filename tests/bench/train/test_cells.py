"""Cells, faults, ratios and the page, from reports of ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tightwire.bench.compare.results import read_result
from tightwire.bench.train.arms import ARMS, open_model
from tightwire.bench.train.bench import TrainBench
from tightwire.bench.train.cells import LinkCells, fault_texts
from tightwire.bench.train.checks import ArmModel, Checks, model_arms
from tightwire.bench.train.measure import Checked, Timed, Wired
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.page import compare_arms
from tightwire.bench.train.probes import Probed, sent_by_node
from tightwire.bench.train.trainee import StepTimes
from tightwire.comm.link.link import parse_link

_ARMS = ("zero3", "zero++", "hybrid", "dgc", "ddp")
_LOSSES = (8.0, 7.9, 7.8)
_RANKS = 4


@pytest.fixture(scope="module")
def models() -> dict[str, ArmModel]:
    return model_arms(TrainBenchOptions(model="tiny", arms=_ARMS), open_model("tiny", 0).config)


def checks_of(models: Mapping[str, ArmModel], losses: Mapping[str, Sequence[float]] | None = None) -> Checks:
    """Checks without a fault, except for ``losses``."""
    checks = Checks(models=models, dtype="float32")
    for arm in _ARMS:
        for rank in range(_RANKS):
            sent = None if ARMS[arm].peer else models[arm].ranks[rank].bytes_sent
            own = tuple((losses or {}).get(arm, _LOSSES))
            checks.add(rank, Checked(arm=arm, losses=own, bytes_sent=sent, peak_bytes=1 << 20, resident_bytes=2 << 20))
    return checks


def cells_of(checks: Checks, link: str = "200mbit", step_s: float = 2.0, payload: int | None = None) -> LinkCells:
    """Steps of ``step_s``, of which one second is computing, on a wire of 1 MB/s for each rank."""
    cells = LinkCells(
        link=link,
        asked_bytes_per_s=parse_link(link).bytes_per_s or 0.0,
        bytes_per_s=2e6,
        world_size=4,
        checks=checks,
    )
    for rank in range(_RANKS):
        for where, seconds in (("across", 1.0), ("inside", 0.001)):
            cells.add(rank, Probed(where=where, num_bytes=0, num_peers=1, seconds=0.0))
            cells.add(rank, Probed(where=where, num_bytes=1_000_000, num_peers=1, seconds=seconds))
        for arm in _ARMS:
            of_node = 1000 if ARMS[arm].peer else checks.models[arm].node_bytes
            cells.add(rank, Wired(arm=arm, payload_bytes=payload or of_node, wire_bytes=of_node + 66))
            for detached in (False, True):
                forward_s = (1.0 if detached else step_s) - 0.5
                times = StepTimes(loss=1.0, forward_s=forward_s, backward_s=0.4, rest_s=0.1, waited_s=0.2)
                cells.add(rank, Timed(arm=arm, detached=detached, number=1, times=times))
    return cells


def test_a_row_compares_a_step_with_its_computing_and_its_bytes(models: dict[str, ArmModel]) -> None:
    rows = {row["arm"]: row for row in cells_of(checks_of(models)).rows()}

    row = rows["zero3"]
    assert row["exposed_s"] == pytest.approx(1.0)
    assert row["node_bytes"] == row["node_payload_bytes"] == 2 * models["zero3"].ranks[0].between_nodes
    assert row["bound_s"] == pytest.approx(max(1.0, row["node_bytes"] / 2e6))
    assert row["prediction_error"] == pytest.approx(row["predicted_s"] / 2.0 - 1)
    assert 1.0 < rows["zero++"]["predicted_s"] < row["predicted_s"]
    assert rows["ddp"]["predicted_s"] is None
    assert not fault_texts(rows.values())


def test_rates_follow_from_large_and_small_collectives(models: dict[str, ArmModel]) -> None:
    rates = cells_of(checks_of(models)).rates()

    assert rates.across_bytes_per_s == pytest.approx(1e6)
    assert rates.inside_bytes_per_s == pytest.approx(1e9)


def test_a_step_that_a_rank_has_not_reported_is_left_out(models: dict[str, ArmModel]) -> None:
    cells = cells_of(checks_of(models))
    late = StepTimes(loss=1.0, forward_s=99.0, backward_s=0.0, rest_s=0.0, waited_s=0.0)

    cells.add(0, Timed(arm="zero3", detached=False, number=2, times=late))

    assert cells.rows()[0]["samples"]["step_s"] == [pytest.approx(2.0)]


@pytest.mark.parametrize(
    ("arm", "losses", "is_wrong"),
    [
        ("hybrid", (8.0, 7.9, 7.8000001), False),  # another order of adding
        ("hybrid", (8.0, 7.9, 7.81), True),
        ("ddp", (8.0, 7.9, 7.81), True),
        ("zero++", (8.0, 7.9, 7.81), False),  # a compressed arm
        ("zero++", (8.0, 7.9, float("nan")), True),
        ("dgc", (8.0, 7.0, 6.0), False),  # another optimizer
    ],
)
def test_an_exact_arm_with_other_losses_is_a_fault(
    arm: str, losses: tuple[float, ...], is_wrong: bool, models: dict[str, ArmModel]
) -> None:
    assert bool(checks_of(models, {arm: losses}).faults(arm)) == is_wrong


def test_arms_that_sum_rank_by_rank_must_be_bit_identical() -> None:
    models = model_arms(TrainBenchOptions(model="tiny", arms=("zero3", "none")), open_model("tiny", 0).config)
    checks = Checks(models=models, dtype="float32")
    for arm, last in (("zero3", 7.8), ("none", 7.8000000000000007)):
        sent = models[arm].ranks[0].bytes_sent
        checks.add(0, Checked(arm=arm, losses=(8.0, last), bytes_sent=sent, peak_bytes=None, resident_bytes=None))

    assert not checks.faults("zero3")
    assert "7.8" in checks.faults("none")[0]


def test_bytes_that_differ_from_the_formula_are_a_fault(models: dict[str, ArmModel]) -> None:
    checks = checks_of(models)
    sent = models["zero3"].ranks[2].bytes_sent
    checks.add(2, Checked(arm="zero3", losses=_LOSSES, bytes_sent=sent + 1, peak_bytes=None, resident_bytes=None))
    cells = cells_of(checks, payload=10**9)

    faults = fault_texts(cells.rows())

    assert f"zero3: ranks sent {[sent, sent, sent + 1, sent]} bytes in a step, by formula {[sent] * 4}" in faults
    assert any(fault.startswith("hybrid: its node sent 1000000000 bytes of payload") for fault in faults)
    assert not any(fault.startswith("ddp") for fault in faults)


def test_zero_pp_is_compared_with_zero3_at_four_times_the_bandwidth(models: dict[str, ArmModel]) -> None:
    checks = checks_of(models)
    rows = [*cells_of(checks, "50mbit", 2.0).rows(), *cells_of(checks, "200mbit", 3.0).rows()]

    found = {tuple(row.values()) for row in compare_arms(rows)}

    assert ("50mbit", "zero++", "zero3", "200mbit", 1.5) in found
    assert ("50mbit", "dgc", "hybrid", "50mbit", 1.0) in found
    assert not [arm for _, arm, *_ in found if arm == "ddp"]


def test_a_result_has_a_page_and_can_be_compared(models: dict[str, ArmModel], tmp_path: Path) -> None:
    class Bench(TrainBench):
        def measure(self) -> None:
            self._by_link = [cells_of(checks_of(models), link) for link in ("50mbit", "200mbit")]
            rates = self._by_link[0].rates()._asdict()
            links = [{"name": "50mbit", "bytes_per_s": 6e6, "how": "tc tbf", "rates": rates}]
            batch = {"sequences": 4, "sequence_tokens": 128}
            self.facts = {"model": "tiny", "num_parameters": 10**6, "dtype": "float32", "links": links, **batch}
            self.facts |= {"nodes": 2, "ranks_per_node": 2}
            self.keep()
            raise ValueError("zero3: it is wrong")

    assert Bench(TrainBenchOptions(model="tiny", output=tmp_path)).run() == 1

    page = next(tmp_path.glob("*.html")).read_text()
    assert "zero3: it is wrong" in page
    assert all(page.count(f">{arm}</td>") >= 4 for arm in _ARMS)  # two links, two tables
    result = read_result(next(tmp_path.glob("*.json")))
    assert [*result.cells][:2] == ["zero3, 50mbit", "zero++, 50mbit"]
    assert next(iter(result.cells.values())).samples["step_s"] == {0: pytest.approx(2.0)}
    assert next(tmp_path.glob("*.csv")).read_text().startswith("link,arm,seconds.p50,")


def test_payload_of_a_node_excludes_headers() -> None:
    text = "Inter-|   Receive\n face |bytes\n    lo: 1 1 0 0 0 0 0 0 9 9 0 0\n wire0: 1 1 0 0 0 0 0 0 10066 3 0 0 0 0 0 0\n"

    sent = sent_by_node(text)

    assert sent.num_bytes == 10066
    assert sent.payload_bytes == 10066 - 3 * 66


def test_bytes_of_a_node_are_unknown_outside_an_emulated_node() -> None:
    with pytest.raises(RuntimeError, match="not on an emulated node"):
        sent_by_node("    lo: 1 1 0 0 0 0 0 0 9 9 0 0\n")
