"""From what ranks tell to rows and faults, from rows to findings and a page."""

from collections.abc import Mapping, Sequence

import pytest

from tightwire.bench.train.arms import ARMS
from tightwire.bench.train.checks import Checks
from tightwire.bench.train.findings import Finding, find
from tightwire.bench.train.formulas import Formulas, formulas_of
from tightwire.bench.train.interface import sent_by_node
from tightwire.bench.train.measure import Checked, Timed, Wired
from tightwire.bench.train.models import open_model
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.page import make_page
from tightwire.bench.train.probe import Probed
from tightwire.bench.train.summary import LinkCells, fault_texts
from tightwire.bench.train.trainee import StepTimes

_ARMS = ("zero3", "zero++", "hybrid", "dgc", "ddp")
_LOSSES = (8.0, 7.9, 7.8)
_RANKS = 4


@pytest.fixture(scope="module")
def formulas() -> dict[str, Formulas]:
    return formulas_of(TrainBenchOptions(model="tiny", arms=_ARMS), open_model("tiny", 0).config)


def checks_of(formulas: Mapping[str, Formulas], losses: Mapping[str, Sequence[float]] | None = None) -> Checks:
    """Where all is as it should be, but for ``losses``."""
    checks = Checks(formulas=formulas, dtype="float32")
    for arm in _ARMS:
        for rank in range(_RANKS):
            sent = None if ARMS[arm].peer else formulas[arm].traffics[rank].bytes_sent
            own = tuple((losses or {}).get(arm, _LOSSES))
            checks.add(rank, Checked(arm=arm, losses=own, bytes_sent=sent, peak_bytes=1 << 20, resident_bytes=2 << 20))
    return checks


def cells_of(checks: Checks, link: str = "200mbit", step_s: float = 2.0, payload: int | None = None) -> LinkCells:
    """Steps of ``step_s``, of which one second is computing, on a wire of 1 MB/s for each rank."""
    cells = LinkCells(link=link, bytes_per_s=2e6, num_nodes=2, world_size=4, checks=checks)
    for rank in range(_RANKS):
        for where, seconds in (("across", 1.0), ("inside", 0.001)):
            cells.add(rank, Probed(where=where, num_bytes=0, others=1, seconds=0.0))
            cells.add(rank, Probed(where=where, num_bytes=1_000_000, others=1, seconds=seconds))
        for arm in _ARMS:
            of_node = 1000 if ARMS[arm].peer else checks.formulas[arm].node_bytes
            cells.add(rank, Wired(arm=arm, payload_bytes=payload or of_node, wire_bytes=of_node + 66))
            for detached in (False, True):
                forward_s = (1.0 if detached else step_s) - 0.5
                times = StepTimes(loss=1.0, forward_s=forward_s, backward_s=0.4, rest_s=0.1, waited_s=0.2)
                cells.add(rank, Timed(arm=arm, detached=detached, number=1, times=times))
    return cells


def test_a_row_holds_a_step_against_its_computing_and_its_bytes(formulas: dict[str, Formulas]) -> None:
    rows = {row["arm"]: row for row in cells_of(checks_of(formulas)).rows()}

    row = rows["zero3"]
    assert row["exposed_s"] == pytest.approx(1.0)
    assert row["node_bytes"] == row["node_payload_bytes"] == 2 * formulas["zero3"].traffics[0].between_nodes
    assert row["bound_s"] == pytest.approx(max(1.0, row["node_bytes"] / 2e6))
    assert row["prediction_error"] == pytest.approx(row["predicted_s"] / 2.0 - 1)
    assert 1.0 < rows["zero++"]["predicted_s"] < row["predicted_s"]
    assert rows["ddp"]["predicted_s"] is None
    assert not fault_texts(rows.values())


def test_a_wire_is_as_fast_as_its_large_messages_are_over_its_small_ones(formulas: dict[str, Formulas]) -> None:
    rates = cells_of(checks_of(formulas)).rates()

    assert rates.across_bytes_per_s == pytest.approx(1e6)
    assert rates.inside_bytes_per_s == pytest.approx(1e9)


def test_a_step_that_not_all_ranks_have_ended_is_left_out(formulas: dict[str, Formulas]) -> None:
    cells = cells_of(checks_of(formulas))
    late = StepTimes(loss=1.0, forward_s=99.0, backward_s=0.0, rest_s=0.0, waited_s=0.0)

    cells.add(0, Timed(arm="zero3", detached=False, number=2, times=late))

    assert cells.rows()[0]["samples_s"]["step"] == [pytest.approx(2.0)]


@pytest.mark.parametrize(
    ("arm", "losses", "is_wrong"),
    [
        ("hybrid", (8.0, 7.9, 7.8000001), False),  # another order of adding
        ("hybrid", (8.0, 7.9, 7.81), True),
        ("ddp", (8.0, 7.9, 7.81), True),
        ("zero++", (8.0, 7.9, 7.81), False),  # what it rounds away is its own to say
        ("zero++", (8.0, 7.9, float("nan")), True),
        ("dgc", (8.0, 7.0, 6.0), False),  # another optimizer
    ],
)
def test_losses_are_those_of_an_exact_sum(
    arm: str, losses: tuple[float, ...], is_wrong: bool, formulas: dict[str, Formulas]
) -> None:
    assert bool(checks_of(formulas, {arm: losses}).faults(arm)) == is_wrong


def test_arms_that_add_rank_by_rank_are_equal_to_the_bit() -> None:
    formulas = formulas_of(TrainBenchOptions(model="tiny", arms=("zero3", "none")), open_model("tiny", 0).config)
    checks = Checks(formulas=formulas, dtype="float32")
    for arm, last in (("zero3", 7.8), ("none", 7.8000000000000007)):
        sent = formulas[arm].traffics[0].bytes_sent
        checks.add(0, Checked(arm=arm, losses=(8.0, last), bytes_sent=sent, peak_bytes=None, resident_bytes=None))

    assert not checks.faults("zero3")
    assert "7.8" in checks.faults("none")[0]


def test_bytes_that_are_not_the_formulas_are_a_fault(formulas: dict[str, Formulas]) -> None:
    checks = checks_of(formulas)
    sent = formulas["zero3"].traffics[2].bytes_sent
    checks.add(2, Checked(arm="zero3", losses=_LOSSES, bytes_sent=sent + 1, peak_bytes=None, resident_bytes=None))
    cells = cells_of(checks, payload=10**9)

    faults = fault_texts(cells.rows())

    assert f"zero3: ranks sent {[sent, sent, sent + 1, sent]} bytes in a step, by formula {[sent] * 4}" in faults
    assert any(fault.startswith("hybrid: its node sent 1000000000 bytes of payload") for fault in faults)
    assert not any(fault.startswith("ddp") for fault in faults)


def test_a_quarter_of_the_bandwidth_is_held_against_the_whole(formulas: dict[str, Formulas]) -> None:
    checks = checks_of(formulas)
    rows = [*cells_of(checks, "50mbit", 2.0).rows(), *cells_of(checks, "200mbit", 3.0).rows()]

    found = find(rows)

    assert Finding("50mbit", "zero++", "zero3", "200mbit", 1.5) in found
    assert Finding("50mbit", "dgc", "hybrid", "50mbit", 1.0) in found
    assert not [each for each in found if each.arm == "ddp"]


def test_the_page_shows_every_cell_and_what_is_wrong(formulas: dict[str, Formulas]) -> None:
    rows = [row for link in ("50mbit", "200mbit") for row in cells_of(checks_of(formulas), link).rows()]
    rows[0]["faults"] = ["it is wrong"]
    on_paper = {
        "gpus": 64,
        "nodes": 8,
        "gbit": 400,
        "arm": "zero++",
        "node_bytes": 1,
        "step_s": 1.0,
        "tokens_per_gpu_s": 2048.0,
        "computing_share": 0.5,
    }
    assumptions = {
        "model": "random:llama-3-8b",
        "gpus_per_node": 8,
        "flops_per_s": 4e14,
        "inside_bytes_per_s": 2e11,
        "inside_round_s": 2e-5,
        "across_round_s": 5e-5,
        "sequences": 1,
        "sequence_tokens": 2048,
    }
    rates = cells_of(checks_of(formulas)).rates()._asdict()
    environment = {
        "time": "now",
        "cpu": "a processor",
        "usable_cores": 2,
        "os": "Linux",
        "python": "3",
        "packages": {},
        "tightwire": "0",
        "git_revision": None,
        "command": ["tightwire"],
    }

    page = make_page(
        {
            "environment": environment,
            "model": "tiny",
            "num_parameters": 10**6,
            "dtype": "float32",
            "nodes": 2,
            "ranks_per_node": 2,
            "sequences": 4,
            "sequence_tokens": 128,
            "seed": 0,
            "links": [{"name": "50mbit", "bytes_per_s": 6e6, "how": "tc tbf", "rates": rates}],
            "left_out": {"10gbit": "cannot be carried"},
            "others_share": 0.5,
            "cells": rows,
            "on_paper": {"assumptions": assumptions, "rows": [on_paper]},
        }
    )

    assert "Not to be trusted: zero3: it is wrong" in page
    assert page.count("<svg") == 3
    assert all(page.count(f'<td class="word">{arm}</td>') >= 4 for arm in _ARMS)  # two links, two tables
    assert ARMS["zero++"].what in page
    assert "On paper. No such machine was measured" in page and "cannot be carried" in page


def test_what_left_a_node_is_read_without_headers() -> None:
    text = "Inter-|   Receive\n face |bytes\n    lo: 1 1 0 0 0 0 0 0 9 9 0 0\n wire0: 1 1 0 0 0 0 0 0 10066 3 0 0 0 0 0 0\n"

    sent = sent_by_node(text)

    assert sent.num_bytes == 10066
    assert sent.payload_bytes == 10066 - 3 * 66


def test_a_machine_without_such_an_interface_is_no_node() -> None:
    with pytest.raises(RuntimeError, match="not on an emulated node"):
        sent_by_node("    lo: 1 1 0 0 0 0 0 0 9 9 0 0\n")
