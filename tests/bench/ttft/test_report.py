from dataclasses import replace
from typing import Any

import pytest

from tightwire.bench.hosts import Sent
from tightwire.bench.ttft.measure import Arm, Measured, Request, Turn
from tightwire.bench.ttft.options import TtftOptions
from tightwire.bench.ttft.proof import Cell
from tightwire.bench.ttft.report import make_rows, recommend
from tightwire.comm.ledger.ledger import Count

CELLS = [Cell(prompt_len=16, concurrency=2), Cell(prompt_len=64, concurrency=2)]
BASE = Arm(name="auto", algorithm="auto", is_default=True, lossless=True, error=0.0)
RING = Arm(name="ring", algorithm="ring", is_default=False, lossless=True, error=0.0)
FLASH = Arm(name="flash-int8", algorithm="flash-int8", is_default=False, lossless=False, error=0.02)
OPTIONS = TtftOptions(algorithms=("ring", "flash-int8"))
BUSY = (1.0, 1.3, 0.9, 2.0, 1.1, 1.0)  # what the machine does to all arms of a round alike


def entry(cell: Cell, arm: Arm, number: int, ttft_s: float, tpot_s: float = 0.01) -> Turn:
    requests = [
        Request(
            ttft_s=BUSY[number] * ttft_s * share,
            tpot_s=BUSY[number] * tpot_s,
            parts={"ttft_s": ttft_s, "compute_s": 0.02, "allreduce_s": ttft_s / 2, "codec_s": None},
        )
        for share in (0.9, 1.1)
    ]
    counts = [Count("all_reduce", arm.algorithm, "prefill", 2, 600, 600, 0.1, 1200)]
    return Turn(cell=cell, arm=arm, round=number, requests=requests, counts=counts)


def measured(rounds: int = 6, *, arms: dict[Arm, dict[str, float]] | None = None) -> Measured:
    times = arms or {BASE: {"ttft_s": 0.10}, RING: {"ttft_s": 0.08}, FLASH: {"ttft_s": 0.05}}
    entries = [entry(c, arm, i, **how) for i in range(rounds) for c in CELLS for arm, how in times.items()]
    return Measured(cells=CELLS, arms=list(times), turns=entries)


def row(found: Measured, arm: Arm) -> dict[str, Any]:
    return next(row for row in make_rows(found) if row["arm"] == arm.name and row["prompt_len"] == 16)


def test_ratios_are_paired_by_round_so_that_a_busy_machine_cancels() -> None:
    found = row(measured(), FLASH)
    assert found["ttft_s"]["n"] == 12 and found["rounds"] == 6
    assert found["ratio"]["ratio"] == pytest.approx(0.5)
    assert found["ratio"]["low"] <= 0.5 + 1e-9 <= found["ratio"]["high"] + 2e-9
    assert found["ratio"]["verdict"] == "faster"
    assert found["tpot_ratio"]["verdict"] == "no difference"
    assert row(measured(), BASE)["ratio"] is None


def test_parts_and_bytes_of_a_row() -> None:
    found = row(measured(), FLASH)
    assert found["parts_s"]["codec_s"] is None, "inside a fused kernel"
    assert found["sent_bytes"] == 300, "of one prompt"
    assert found["bound"] is None, "no wire of a known rate"


def test_bytes_of_a_token_on_the_wire_are_messages_frames_and_a_plan() -> None:
    found = measured()
    found.output_len, found.num_peers, found.comm = 3, 3, {"transport": "sockets"}
    sums = Count("all_reduce", "one-shot", "decode", 122, 122 * 3 * 1152, 0, 0.1, 0)
    picks = Count("all_gather", "direct", "decode", 2, 2 * 3 * 8, 0, 0.0, 0)
    wire = Sent(0, 0), Sent(500_000, 400)  # of two tokens
    turn = entry(CELLS[0], RING, 0, 0.1)
    turn.requests, turn.counts = [replace(turn.requests[0], wire=wire)], [sums, picks]
    found.arms, found.turns = [BASE, RING], [turn, entry(CELLS[0], BASE, 0, 0.1)]
    token = row(found, RING)
    assert token["wire_token_bytes"] == 250_000
    assert token["wire_token_formula"] == 61 * 3 * (1152 + 24) + 3 * (8 + 24) + 3 * 58 + 66 * 200
    found.comm = {"transport": "process-group"}
    assert row(found, RING)["wire_token_formula"] is None, "gloo has other headers"


def test_the_bound_is_computing_and_bytes_over_bandwidth() -> None:
    alone = Cell(prompt_len=16, concurrency=1)
    found = measured(arms={BASE: {"ttft_s": 0.1}})
    found.cells, found.turns = [alone], [entry(alone, BASE, number, 0.1) for number in range(3)]
    found.comm = {"link": {"measured_bytes_per_s": 5000.0, "asked_bytes_per_s": 6000.0, "latency_s": 0.0}}
    bound = row(found, BASE)["bound"]
    assert bound["wire_s"] == pytest.approx(300 / 5000)
    assert bound["bound_s"] == pytest.approx(0.02 + 300 / 5000)
    found.comm["overlap"] = True
    assert row(found, BASE)["bound"]["bound_s"] == pytest.approx(300 / 5000), "at the same time, the slower of the two"
    found.ranks_share_wire = True
    assert row(found, BASE)["bound"] is None


def test_the_same_one_again_is_no_difference_and_no_better_choice() -> None:
    again = Arm(name="auto#2", algorithm="auto", is_default=True, lossless=True, error=0.0)
    found = measured(arms={BASE: {"ttft_s": 0.1}, again: {"ttft_s": 0.0999}})
    assert row(found, again)["ratio"]["verdict"] == "no difference"
    (only,) = recommend(found, OPTIONS)
    assert only["arm"] == BASE.name


def test_the_fastest_of_each_kind_is_recommended_with_its_error() -> None:
    exact, lossy = recommend(measured(), OPTIONS)
    assert exact["command"] == "tightwire serve smollm2-135m --tp 2 --allreduce ring"
    assert exact["ratio"]["ratio"] == pytest.approx(0.8)
    assert lossy["command"].endswith("--allreduce flash-int8")
    assert lossy["reason"].startswith("TTFT 0.625 [0.625, 0.625], TPOT 1.000 [1.000, 1.000] of ring's")
    assert "error 0.02" in lossy["reason"]


def test_what_is_not_certain_is_not_recommended() -> None:
    times = {BASE: {"ttft_s": 0.1}, RING: {"ttft_s": 0.0995}, FLASH: {"ttft_s": 0.0999}}
    (only,) = recommend(measured(arms=times), OPTIONS)
    assert only["arm"] == BASE.name and "no other" in only["reason"]


def test_a_server_slower_than_the_default_is_never_recommended() -> None:
    """As on shared memory: two-shot has the TTFT of auto and longer later tokens, and the baseline, gloo, is slowest."""
    native = Arm(name="native", algorithm="native", is_default=False, lossless=True, error=0.0)
    two_shot = Arm(name="two-shot", algorithm="two-shot", is_default=False, lossless=True, error=0.0)
    times = {
        BASE: {"ttft_s": 0.370, "tpot_s": 0.0082},
        native: {"ttft_s": 0.511, "tpot_s": 0.0120},
        two_shot: {"ttft_s": 0.372, "tpot_s": 0.0103},
    }
    found = measured(arms=times)
    found.baseline_name = "native"
    (only,) = recommend(found, OPTIONS)
    assert only["command"].endswith("--allreduce auto")
    assert row(found, two_shot)["ratio"]["ratio"] == pytest.approx(0.372 / 0.511), "the table has the asked baseline"


def test_a_gain_that_is_paid_for_in_decoding_is_named_and_not_recommended() -> None:
    times = {BASE: {"ttft_s": 0.1}, RING: {"ttft_s": 0.05, "tpot_s": 0.02}, FLASH: {"ttft_s": 0.06}}
    exact, lossy = recommend(measured(arms=times), OPTIONS)
    assert exact["arm"] == "auto" and "; ring: TTFT 0.500 [0.500, 0.500], TPOT 2.000 [2.000, 2.000]" in exact["reason"]
    assert lossy["arm"] == "flash-int8" and lossy["kind"] == "lossy"
