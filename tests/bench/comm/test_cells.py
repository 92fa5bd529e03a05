import pytest

from tightwire.bench.comm.cells import Cells, zero_rate
from tightwire.bench.comm.measure import Checked, Timed


def _checked(name: str, *, digest: str = "d", error: float | None = None) -> Checked:
    return Checked(
        size=3000, algorithm=name, digest=digest, wire_bytes=4000, formula_bytes=4000, relative_error=error,
        share_of_bound=None if error is None else 0.5,
    )  # fmt: skip


def _timed(done: int, **seconds: list[float]) -> Timed:
    return Timed(size=3000, seconds=dict(seconds), changed=(), done=done, rounds=3)


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    cells = Cells(3)
    for rank in range(3):
        cells.add(rank, _checked("native", error=0.1 if rank == 0 else None))
        cells.add(rank, _checked("ring", error=0.2 if rank == 0 else None))
    cells.add(0, _timed(2, native=[1.0, 2.0], ring=[1.0, 1.0]))
    cells.add(1, _timed(3, native=[3.0, 1.0, 5.0], ring=[0.5, 0.5, 0.5]))
    cells.add(0, _timed(3, native=[4.0], ring=[1.0]))
    cells.add(2, _timed(3, native=[0.1, 0.1, 0.1], ring=[0.1, 0.1, 2.0]))

    native, ring = cells.rows()

    assert [row["samples"]["seconds"] for row in (native, ring)] == [[3.0, 2.0, 5.0], [1.0, 1.0, 2.0]]
    assert (native["seconds"]["p50"], native["seconds"]["n"]) == (3.0, 3)
    assert native["algbw_bytes_per_s"] == pytest.approx(1000)
    assert native["busbw_bytes_per_s"] == pytest.approx(1000 * 4 / 3)  # 2 (N-1)/N with three ranks
    assert (native["relative_error"], native["wire_bytes"]) == (0.1, 4000)
    assert ring["speed_up_over_native"] == pytest.approx(3.0)
    assert cells.faults() == []


def test_a_run_cut_short_keeps_the_calls_that_all_ranks_made() -> None:
    cells = Cells(2)
    for rank in range(2):
        cells.add(rank, _checked("ring", error=0.0 if rank == 0 else None))
    cells.add(0, _timed(2, ring=[1.0, 2.0]))

    assert cells.rows() == []  # no rank but one has told of a call

    cells.add(1, _timed(1, ring=[4.0]))
    (row,) = cells.rows()
    assert row["samples"]["seconds"] == [4.0] and row["speed_up_over_native"] is None


def test_bits_are_compared_once_all_ranks_reported() -> None:
    cells = Cells(2)
    cells.add(0, _checked("ring", digest="a", error=0.0))
    assert cells.faults() == []

    cells.add(1, _checked("ring", digest="b"))
    assert cells.faults() == ["ring at 3000 bytes: ranks got different bits: rank 0 a, rank 1 b"]


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(10.0, -1.0), (5.0, 1.0)], 1 / 0.15),  # linear in 1 / rate: -1 at 1 / 10, 1 at 1 / 5, so 0 at 0.15
        ([(10.0, 1.0), (5.0, 2.0)], None),  # faster on every link
        ([(10.0, 1.0)], None),
    ],
)
def test_the_crossover_lies_between_two_links(points: list[tuple[float, float]], rate: float | None) -> None:
    assert zero_rate(points) == (None if rate is None else pytest.approx(rate))
