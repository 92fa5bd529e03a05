from typing import Any

import pytest

from tightwire.bench.stream.measure import Answered, PassTrace, Timed
from tightwire.bench.stream.options import Arm
from tightwire.bench.stream.report import Cells, fault_texts, verdict

PLAIN, PACKED = Arm("host", "none", 1000), Arm("host", "int4", 1000)
BATCH = 8


def _timed(arm: Arm, kind: str, seconds: list[float], *, stall_s: float | None = None, **more: Any) -> Timed:
    batch = None if kind == "fetch" else BATCH
    traces = [] if stall_s is None else [PassTrace(pass_s=s, fetch_s=s, stall_s=stall_s) for s in seconds]
    values = {"disorder": None, **more}
    return Timed(arm=arm, kind=kind, batch=batch, seconds=seconds, traces=traces, **values)


def _answered(arm: Arm, step_bytes: int, tokens: list[int]) -> Answered:
    return Answered(arm=arm, step_bytes=step_bytes, tokens=tokens, resident_tokens=[1, 2, 3, 4])


def _group() -> Cells:
    """Two ranks; the second is slower at everything."""
    group = Cells(tp=2, world_size=2)
    for rank, slower in ((0, 1.0), (1, 2.0)):
        for arm, step_bytes, fetch_s in ((PLAIN, 3600, 2.0), (PACKED, 900, 0.5)):
            group.add(rank, _answered(arm, step_bytes, [1, 2, 3, 4] if arm == PLAIN else [1, 2, 9, 4]))
            group.add(rank, _timed(arm, "compute", [0.3 * slower, 0.4 * slower, 0.5 * slower]))
            group.add(rank, _timed(arm, "fetch", [fetch_s * slower] * 3))
            group.add(rank, _timed(arm, "step", [1.1 * fetch_s * slower] * 3, stall_s=0.5 * slower * fetch_s))
    return group


def test_the_bound_is_the_longer_of_fetch_and_compute() -> None:
    plain, packed = _group().rows()

    assert (plain["fetch_s"], plain["compute_s"], plain["bound_s"], plain["bound_by"]) == (4.0, 0.8, 4.0, "source")
    assert plain["over_bound"] == pytest.approx(1.1)
    assert plain["bytes_per_s"] == pytest.approx(900)
    assert plain["wire_s"] == pytest.approx(3.6) and plain["over_wire_bound"] == pytest.approx(4.4 / 3.6)
    assert plain["tokens_per_s"] == pytest.approx(8 / 4.4)
    assert plain["overlap"] == pytest.approx((4.4 - 2.0) / (4.4 - 2.0))
    assert packed["bound_s"] == pytest.approx(1.0) and packed["speed_up_over_none"] == pytest.approx(4.0)


def test_other_tokens_are_a_fault_only_without_a_codec() -> None:
    group = _group()
    assert [row["faults"] for row in group.rows()] == [[], []]
    assert group.rows()[1]["same_tokens"] == 0.5  # as long as they go together

    group.add(0, _answered(PLAIN, 3600, [1, 2, 9, 4]))

    assert fault_texts(group.rows()) == [
        "host none at tp 2: rank 0 generates [1, 2, 9, 4], but with resident weights [1, 2, 3, 4]"
    ]


def test_the_tokens_of_every_rank_are_compared_with_resident_weights() -> None:
    group = _group()

    group.add(1, _answered(PLAIN, 3600, [1, 9, 9, 9]))

    row = group.rows(PLAIN)[0]
    assert row["same_tokens"] == 0.25
    assert row["faults"] == ["rank 1 generates [1, 9, 9, 9], but with resident weights [1, 2, 3, 4]"]


def test_a_wrong_buffer_order_is_a_fault() -> None:
    group = _group()

    group.add(1, _timed(PACKED, "step", [1.0], stall_s=0.1, disorder="C2: too early"))

    assert fault_texts(group.rows()) == ["host int4 at tp 2: rank 1: C2: too early"]


def test_a_shortened_run_keeps_the_cells_that_all_ranks_finished() -> None:
    group = _group()
    other = Arm("host", "int8", 1000)
    for rank in range(2):
        group.add(rank, _answered(other, 1800, [1, 2, 3, 4]))
        group.add(rank, _timed(other, "fetch", [1.0]))
        group.add(rank, _timed(other, "compute", [1.0]))
    group.add(0, _timed(other, "step", [1.0], stall_s=0.1))

    assert [row["codec"] for row in group.rows()] == ["none", "int4"]
    assert len(group.rows(PLAIN)) == 1 and group.rows(other) == []


def test_the_verdict_counts_cells_near_their_bound() -> None:
    rows = [{"over_bound": bound, "overlap": overlap} for bound, overlap in ((1.1, 0.95), (1.11, 0.94), (1.5, 1.0))]

    assert verdict(rows) == "1 of 3 cells are within 10% of the bound; 2 hide 95% or more."
    assert "hide" not in verdict([{"over_bound": 1.0, "overlap": None}])  # there is no trace on CUDA
