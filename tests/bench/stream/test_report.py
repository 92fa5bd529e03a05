import pytest

from tightwire.bench.stream.measure import Answered, Timed
from tightwire.bench.stream.options import Arm
from tightwire.bench.stream.report import Cells, verdict

PLAIN, PACKED = Arm("host", "none", 1000), Arm("host", "int4", 1000)
BATCH = 8


def _timed(arm: Arm, kind: str, seconds: list[float]) -> Timed:
    return Timed(arm=arm, kind=kind, batch=None if kind == "fetch" else BATCH, seconds=seconds)


def _group() -> Cells:
    group = Cells(tp=2)
    for arm, step_bytes, fetch_s in ((PLAIN, 3600, 4.0), (PACKED, 900, 1.0)):
        group.add(Answered(arm=arm, step_bytes=step_bytes, same_tokens=1.0))
        group.add(_timed(arm, "compute", [0.6, 0.8, 1.0]))
        group.add(_timed(arm, "fetch", [fetch_s] * 3))
        group.add(_timed(arm, "step", [1.1 * fetch_s] * 3))
    return group


def test_the_bound_is_the_longer_of_fetch_and_compute() -> None:
    plain, packed = _group().rows()

    assert (plain["fetch_s"], plain["compute_s"], plain["bound_s"], plain["bound_by"]) == (4.0, 0.8, 4.0, "source")
    assert plain["over_bound"] == pytest.approx(1.1)
    assert plain["bytes_per_s"] == pytest.approx(900)
    assert plain["tokens_per_s"] == pytest.approx(8 / 4.4)
    assert plain["overlap"] == pytest.approx((4.0 + 0.8 - 4.4) / 0.8)
    assert packed["bound_s"] == pytest.approx(1.0) and packed["speed_up_over_none"] == pytest.approx(4.0)


def test_a_shortened_run_keeps_the_cells_with_all_kinds_of_passes() -> None:
    group = _group()
    other = Arm("host", "int8", 1000)
    group.add(Answered(arm=other, step_bytes=1800, same_tokens=1.0))
    group.add(_timed(other, "fetch", [1.0]))
    group.add(_timed(other, "compute", [1.0]))

    assert [row["codec"] for row in group.rows()] == ["none", "int4"]
    assert len(group.rows(PLAIN)) == 1 and group.rows(other) == []


def test_the_verdict_counts_cells_near_their_bound() -> None:
    rows = [{"over_bound": bound, "overlap": overlap} for bound, overlap in ((1.1, 0.95), (1.11, 0.94), (1.5, 1.0))]

    assert verdict(rows) == "1 of 3 cells are within 10% of the bound; 2 hide 95% or more."


def test_neighbours_of_a_long_series_count_as_one_sample_in_a_comparison() -> None:
    group = Cells(tp=1)
    group.add(Answered(arm=PLAIN, step_bytes=3600, same_tokens=1.0))
    for kind in ("compute", "fetch", "step"):
        group.add(_timed(PLAIN, kind, [1.0] * 60))

    assert group.rows()[0]["batch"] == 3
