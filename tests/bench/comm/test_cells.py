import pytest

from tightwire.bench.comm.cells import Cells, find_faults
from tightwire.bench.comm.measure import Outcome


def _outcome(name: str, seconds: list[float], *, error: float = 0.0, digest: str = "d") -> Outcome:
    return Outcome(
        size=3000, algorithm=name, digest=digest, wire_bytes=4000, formula_bytes=4000, squared_error=error**2,
        squared_exact=1.0, share_of_bound=0.5, seconds=seconds,
    )  # fmt: skip


def test_a_call_takes_as_long_as_its_slowest_rank() -> None:
    cells = Cells(3)
    native, ring = _outcome("native", [1.0, 2.0, 4.0], error=0.1), _outcome("ring", [1.0] * 3, error=0.2)
    assert cells.add(0, [native, ring]) == []
    assert cells.add(2, [_outcome("native", [0.1] * 3), _outcome("ring", [0.1, 0.1, 2.0])]) == []

    rows = cells.add(1, [_outcome("native", [3.0, 1.0, 5.0]), _outcome("ring", [0.5] * 3)])

    native, ring = rows
    assert cells.rows == rows
    assert [row["samples"]["seconds"] for row in rows] == [[3.0, 2.0, 5.0], [1.0, 1.0, 2.0]]
    assert (native["seconds"]["p50"], native["seconds"]["n"]) == (3.0, 3)
    assert native["algbw_bytes_per_s"] == pytest.approx(1000)
    assert native["busbw_bytes_per_s"] == pytest.approx(1000 * 4 / 3)  # 2 (N-1)/N with three ranks
    assert (native["relative_error"], native["wire_bytes"]) == (pytest.approx(0.1 / 3**0.5), 4000)  # of three pieces
    assert ring["speed_up_over_native"] == pytest.approx(3.0)
    assert cells.faults() == []


def test_unlike_bits_are_a_fault() -> None:
    cell = [_outcome("ring", [1.0], digest="a", error=0.0), _outcome("ring", [1.0], digest="b")]
    assert find_faults(cell) == ["ranks got different bits: rank 0 a, rank 1 b"]
