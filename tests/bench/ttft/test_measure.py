import pytest

from tightwire.bench.ttft.measure import Agreement
from tightwire.bench.ttft.proof import Cell
from tightwire.bench.ttft.requests import Arm

CELL = Cell(prompt_len=16, concurrency=1)
LOSSLESS = Arm(name="ring", algorithm="ring", is_default=False, lossless=True, error=0.0)
LOSSY = Arm(name="flash-int4", algorithm="flash-int4", is_default=False, lossless=False, error=0.1)


@pytest.mark.parametrize(
    ("arm", "gap", "in_top", "dtype", "wrong"),
    [
        (LOSSLESS, None, True, "bfloat16", None),
        (LOSSLESS, 0.2, True, "bfloat16", None),
        (LOSSLESS, 0.2, True, "float32", "at most 0.001 is allowed"),
        (LOSSLESS, 0.3, True, "bfloat16", "at most 0.25 is allowed"),
        (LOSSY, 0.3, True, "bfloat16", None),
        (LOSSY, 3.9, True, "bfloat16", None),
        (LOSSY, 4.1, True, "bfloat16", "at most 4 "),
        (LOSSY, 1.1, False, "bfloat16", "at most 1 "),
        (LOSSY, 0.5, False, "bfloat16", None),
    ],
)
def test_answers_may_differ_from_the_lossless_one_within_limits(
    arm: Arm, gap: float | None, in_top: bool, dtype: str, wrong: str | None
) -> None:
    fault = Agreement(cell=CELL, arm=arm, matched=3, num_tokens=8, gap=gap, in_top=in_top).fault(dtype)
    assert (fault is None) if wrong is None else fault is not None and wrong in fault and "token 4 of 8" in fault
