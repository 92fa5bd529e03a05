"""Keys of the best numbers: those of the reference, whatever stands in a row."""

import pytest
import torch

from tightwire.kernels.best_number import best_keys, best_keys_reference


@pytest.mark.parametrize("num_columns", [1, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_the_reference_to_the_bit(num_columns: int) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    x_RV = torch.randn(40, num_columns, generator=generator)
    x_RV[10:20] = x_RV[10:20].round()  # ties, and zeros of both signs
    x_RV[20:30] = -x_RV[20:30].abs()
    assert torch.equal(best_keys(x_RV, 7), best_keys_reference(x_RV, 7))


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [-0.0, 0.0],
        [-torch.inf, -torch.inf],
        [-torch.inf, -1e38],
        [torch.inf, 3.0, torch.inf],
        [1.0, torch.nan, torch.inf],
        [-torch.nan, torch.nan],
        [1e-45, 0.0],
        [-1e-45, -0.0],
    ],
    ids=str,
)
def test_numbers_at_the_edges(values: list[float]) -> None:
    for place in (0, 1020, 1500):
        x_RV = torch.full((2, 2000), -torch.inf)
        x_RV[:, place : place + len(values)] = torch.tensor(values)
        x_RV[1].nan_to_num_(nan=torch.nan, neginf=-3e38)
        assert torch.equal(best_keys(x_RV, 3), best_keys_reference(x_RV, 3))


def test_rows_with_gaps_and_other_kinds_of_numbers() -> None:
    x_RV = torch.randn(9, 700, generator=torch.Generator().manual_seed(0))
    for view in (x_RV[:, :300], x_RV[::2], x_RV.t(), x_RV.bfloat16()):
        assert torch.equal(best_keys(view, 0), best_keys_reference(view, 0))


def test_rows_without_numbers_are_refused_as_by_the_reference() -> None:
    with pytest.raises(IndexError, match="non-zero size"):
        best_keys(torch.zeros(2, 0), 0)
