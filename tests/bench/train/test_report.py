"""Rows, faults and the page, from the results of ranks."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tightwire.bench.compare.results import read_result
from tightwire.bench.hosts import Sent
from tightwire.bench.train import ranks
from tightwire.bench.train.bench import TrainBench
from tightwire.bench.train.measure import Checked, Timed, Wired, open_model
from tightwire.bench.train.options import ARMS, TrainOptions
from tightwire.bench.train.report import (
    ArmModel,
    Checks,
    LinkCells,
    describe_link,
    describe_setting,
    fault_texts,
    model_arms,
)
from tightwire.training.estimate.step_time import Computing, Rates

_ARMS = ("zero3", "zero++", "hybrid", "dgc", "ddp")
_LOSSES = [8.0, 7.9, 7.8]
_RATES = Rates(1e6, 0.0, 1e9, 0.0)


@pytest.fixture(scope="module")
def models() -> dict[str, ArmModel]:
    return model_arms(TrainOptions(model="tiny", arms=_ARMS), open_model("tiny", 0).config)


def checked(losses: Sequence[float], model: ArmModel | None) -> Checked:
    sent = [0] * 4 if model is None else [rank.bytes_sent for rank in model.ranks]
    return Checked(losses=list(losses), bytes_sent=sent, peak_bytes=1 << 20)


def checks_of(models: Mapping[str, ArmModel], losses: Mapping[str, Sequence[float]] | None = None) -> Checks:
    """Checks without a fault, except for ``losses``."""
    found = {arm: checked((losses or {}).get(arm, _LOSSES), models.get(arm)) for arm in _ARMS}
    return Checks(models=models, dtype="float32", checked=found)


def cells_of(
    checks: Checks, link: str = "200mbit", step_s: float = 2.0, payload: int | None = None, sequences: int = 4
) -> LinkCells:
    """Steps of ``step_s``, of which one second is computing, on a wire of 1 MB/s for each rank."""
    cells = LinkCells(link=link, sequences=sequences, checks=checks)
    cells.add(_RATES)
    for arm in _ARMS:
        of_node = 1000 if ARMS[arm].peer else checks.models[arm].node_bytes
        cells.add(Wired(arm, payload or of_node))
        cells.add(Timed(arm, step_s, None))
        if not ARMS[arm].peer:
            cells.add(Timed(arm, 1.0, Computing(0.5, 0.4, 0.1)))
    return cells


def test_a_row_compares_a_step_with_its_computing_and_its_bytes(models: dict[str, ArmModel]) -> None:
    rows = {row["arm"]: row for row in cells_of(checks_of(models)).rows()}

    row = rows["zero3"]
    assert row["exposed_s"] == pytest.approx(1.0)
    assert row["node_bytes"] == row["node_payload_bytes"] == 2 * models["zero3"].ranks[0].between_nodes
    assert row["prediction_error"] == pytest.approx(row["predicted_s"] / 2.0 - 1)
    assert 1.0 < rows["zero++"]["predicted_s"] < row["predicted_s"]
    assert rows["ddp"]["predicted_s"] is None
    assert not fault_texts(rows.values())


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


def test_bytes_that_differ_from_the_formula_are_a_fault(models: dict[str, ArmModel]) -> None:
    checks = checks_of(models)
    sent = models["zero3"].ranks[2].bytes_sent
    checks.checked["zero3"].bytes_sent[2] += 1
    cells = cells_of(checks, payload=10**9)

    faults = fault_texts(cells.rows())

    assert f"zero3: ranks sent {[sent, sent, sent + 1, sent]} bytes in a step, by formula {[sent] * 4}" in faults
    assert any(fault.startswith("hybrid: its node sent 1000000000 bytes of payload") for fault in faults)
    assert not any(fault.startswith("ddp") for fault in faults)


def test_a_result_has_a_page_and_can_be_compared(models: dict[str, ArmModel], tmp_path: Path) -> None:
    class Bench(TrainBench):
        def measure(self) -> None:
            self._by_link = [cells_of(checks_of(models), link) for link in ("50mbit", "200mbit")]
            self._by_link.append(cells_of(checks_of(models), "200mbit", sequences=8))
            links = [{"name": "50mbit", "measured_bytes_per_s": 6e6, "rates": _RATES._asdict()}]
            batch = {"sequences": [4, 8], "sequence_tokens": 128}
            self.facts = {"model": "tiny", "num_parameters": 10**6, "dtype": "float32", "links": links, **batch}
            self.facts |= {"nodes": 2, "ranks_per_node": 2}
            self.keep()
            raise ValueError("zero3: it is wrong")

    assert Bench(TrainOptions(model="tiny", output=tmp_path)).run() == 1

    page = next(tmp_path.glob("*.html")).read_text()
    assert "zero3: it is wrong" in page
    assert all(page.count(f">{arm}</td>") >= 6 for arm in _ARMS)  # two links, one of them twice, two tables
    assert all(
        f"Step time by {what}" in page
        for what in ("link between nodes, Mbit/s, 8 sequences a rank", "sequences, 200mbit")
    )
    result = read_result(next(tmp_path.glob("*.json")))
    assert [*result.cells][:2] == ["zero3, 50mbit, 4 sequences", "zero++, 50mbit, 4 sequences"]
    assert next(iter(result.cells.values())).samples["step_s"] == {0: pytest.approx(2.0)}
    assert next(tmp_path.glob("*.csv")).read_text().startswith("link,sequences,arm,seconds.p50,")


def test_a_link_has_no_rate_inside_nodes_of_one_rank() -> None:
    rates = {"across_bytes_per_s": 1e6, "across_round_s": 1e-3, "inside_bytes_per_s": math.inf, "inside_round_s": 0.0}
    link = {"name": "50mbit", "measured_bytes_per_s": 6e6, "rates": rates}
    text = "50mbit: 48 Mbit/s in a bulk transfer; collectives of a rank: 1.00 MB/s and 1.0 ms across nodes"
    assert describe_link(link) == text
    rates |= {"inside_bytes_per_s": 2e6, "inside_round_s": 2e-3}
    assert describe_link(link) == f"{text}, 2.00 MB/s and 2.0 ms inside nodes"


@pytest.mark.parametrize(("ranks", "words"), [(1, "2 nodes of 1 rank, one"), (2, "2 nodes of 2 ranks, one")])
def test_the_setting_counts_ranks(ranks: int, words: str) -> None:
    facts = {"model": "tiny", "num_parameters": 1e6, "dtype": "float32", "nodes": 2, "ranks_per_node": ranks}
    assert words in describe_setting(facts | {"sequences": (4,), "sequence_tokens": 128})


def test_payload_of_a_node_excludes_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "read_sent", lambda counters: Sent(10066, 3))
    assert ranks.sent_by_node() == 10066 - 3 * 66
