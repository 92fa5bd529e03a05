"""Runs of rows are copied to their places, nothing else is written, and runs outside are refused."""

import pytest
import torch

from tightwire.kernels.row_runs import copy_runs, copy_runs_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_kernel_does_what_the_reference_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source = torch.randint(0, 100, (20, 2, 3, 5)).to(dtype)
    target = torch.randint(0, 100, (12, 2, 3, 5)).to(dtype)
    runs = torch.tensor([[3, 0, 1], [17, 1, 3], [0, 6, 0], [5, 6, 6]])
    expected = target.clone()
    copy_runs_reference(expected, source, runs)
    copy_runs(target, source, runs)
    assert torch.equal(target, expected)
    assert torch.equal(target[1:4], source[17:20])


def test_no_runs_copy_nothing() -> None:
    target = torch.ones(2, 3)
    for num_runs in (0, 1):  # and a run of no rows
        copy_runs(target, torch.zeros(0, 3), torch.zeros(num_runs, 3, dtype=torch.int64))
    assert target.sum() == 6


@pytest.mark.parametrize("run", [[-1, 0, 1], [0, -1, 1], [0, 0, -1], [3, 0, 2], [0, 2, 2]])
def test_a_run_outside_is_refused_by_number(run: list[int]) -> None:
    runs = torch.tensor([[0, 0, 1], run])
    with pytest.raises(ValueError, match=r"run 1 is .* there are 4 rows to copy from and 3 to copy to"):
        copy_runs(torch.zeros(3, 8), torch.zeros(4, 8), runs)


def test_rows_of_different_sizes_are_refused() -> None:
    runs = torch.tensor([[0, 0, 1]])
    with pytest.raises(ValueError, match=r"one shape and dtype; got \(8,\) torch.float32 and \(7,\)"):
        copy_runs(torch.zeros(3, 8), torch.zeros(4, 7), runs)
    with pytest.raises(ValueError, match="contiguous"):
        copy_runs(torch.zeros(3, 8), torch.zeros(8, 4).t(), runs)
    with pytest.raises(ValueError, match=r"int64, got \(1, 3\) torch.int32"):
        copy_runs(torch.zeros(3, 8), torch.zeros(4, 8), runs.int())
