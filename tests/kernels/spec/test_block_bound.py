import pytest
import torch
from helpers.kernels.block_data import NUMBERS, all_formats, format_id, formats_with, hard_numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from tightwire.kernels.block_quant import decode, encode
from tightwire.kernels.spec.block_bound import max_error
from tightwire.kernels.spec.block_format import BlockFormat

# The formats of one group size are one test, because most formats take milliseconds.
GROUPS = pytest.mark.parametrize("group_elems", [32, 64, 128])


def _error(x_N: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    return (decode(encode(x_N, fmt), fmt, x_N.numel(), torch.float32).double() - x_N.double()).abs()


def _holds(error_N: torch.Tensor, bound_N: torch.Tensor) -> bool:
    return bool(((error_N <= bound_N) | (bound_N == torch.inf)).all())


@GROUPS
def test_the_bound_holds_for_hard_numbers(group_elems: int) -> None:
    for dtype in NUMBERS:
        x = hard_numbers(dtype)
        for fmt in formats_with(group_elems):
            assert _holds(_error(x, fmt), max_error(x, fmt)), format_id(fmt)


@GROUPS
def test_the_bound_is_tight(group_elems: int) -> None:
    """Some number of many comes close to it, but where rotation makes that unlikely: there errors nearly cancel."""
    x = torch.randn(4000, generator=torch.Generator().manual_seed(5))
    for fmt in formats_with(group_elems):
        ratio = _error(x, fmt) / max_error(x, fmt)
        least = 0.1 if fmt.hadamard else 0.9
        assert least < ratio.max() <= 1, format_id(fmt)


@settings(max_examples=150, derandomize=True, database=None)
@given(
    fmt=st.sampled_from(all_formats()),
    numbers=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=140),
)
def test_the_bound_holds_for_any_numbers(fmt: BlockFormat, numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    assert _holds(_error(x, fmt), max_error(x, fmt))


def test_a_broken_group_has_no_bound_and_its_neighbour_has_one() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(6))
    x[5] = torch.nan
    bound = max_error(x, BlockFormat(8))
    assert (bound[:128] == torch.inf).all()
    assert (bound[128:] < 0.02).all()


def test_an_empty_tensor_has_no_error() -> None:
    assert max_error(torch.zeros(0), BlockFormat(8)).shape == (0,)
