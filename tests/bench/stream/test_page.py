from typing import Any

from tightwire.bench.stream.page import crowds, verdict


def _row(over_bound: float, over_cores_bound: float, overlap: float | None, tp: int = 1, dp: int = 1) -> dict[str, Any]:
    return {"over_bound": over_bound, "over_cores_bound": over_cores_bound, "overlap": overlap, "tp": tp, "dp": dp}


def test_the_verdict_counts_cells_near_their_bound() -> None:
    rows = [_row(1.10, 1.0, 0.95), _row(1.11, 1.10, 0.94), _row(1.5, 1.2, 1.0)]

    assert verdict(rows) == (
        "Of 3 cells 1 are within 10% of the bound, 2 within 10% of it or of the cores' time; 2 hide 95% or more."
    )
    assert "hide" not in verdict([_row(1.0, 1.0, None)])  # on CUDA no trace tells


def test_more_ranks_than_cores_give_a_warning() -> None:
    rows = [_row(1.0, 1.0, None, tp, dp) for tp, dp in ((1, 1), (2, 1), (2, 2), (2, 2))]

    [words] = crowds(2, "cpu", rows)

    assert words.startswith("4 ranks on 2 cores")
    assert crowds(2, "cuda", rows) == []
