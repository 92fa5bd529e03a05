from dataclasses import replace
from typing import Any

import pytest
from harness import run_in_process
from torch import Tensor

from tightwire.bench.comm import measure as measure_module
from tightwire.bench.comm.cells import Cells
from tightwire.bench.comm.measure import MeasurePlan, Outcome, measure
from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce

_PLAN = MeasurePlan(
    algorithms=("two-shot", "flash-int8"), sizes=(3 << 20,), dtype="bfloat16", repeats=3, seconds_per_size=0.01, seed=1
)


def _outcomes(group: Group, plan: MeasurePlan) -> list[Outcome]:
    return next(outcomes for outcomes in measure(group, plan) if outcomes)


def _rows(plan: MeasurePlan) -> list[dict[str, Any]]:
    cells = Cells(2)
    for rank, outcomes in enumerate(run_in_process(2, _outcomes, plan)):
        cells.add(rank, outcomes)
    return cells.rows


def test_ranks_share_the_pieces_of_a_message_and_find_what_one_rank_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = _rows(_PLAN)
    monkeypatch.setattr(measure_module, "_PIECE_ELEMS", 1 << 30)
    one = _rows(_PLAN)  # of other numbers: their source is that of a piece

    assert not any(row["faults"] for row in pieces + one)
    for piece, whole in zip(pieces, one, strict=True):
        assert 0 < piece["share_of_bound"] <= 1 and abs(piece["relative_error"] / whole["relative_error"] - 1) < 0.01


class _LastIsWrong:
    def __init__(self, right: AllReduce) -> None:
        self._right, self.wire_bytes, self.max_error = right, right.wire_bytes, right.max_error

    def __call__(self, x: Tensor) -> Tensor:
        result = self._right(x)
        result[-1] += 1 + result[-1].abs()
        return result


def _make_wrong(name: str, group: Group) -> Any:
    return _LastIsWrong(make_all_reduce(name, group))


def test_one_wrong_number_in_the_last_piece_is_a_fault() -> None:
    for row in _rows(replace(_PLAN, make=_make_wrong)):
        assert "times the algorithm's bound" in row["faults"][0]
