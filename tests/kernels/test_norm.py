import re
from collections.abc import Callable

import pytest
import torch

from tightwire.kernels.norm import add_rms_norm, rms_norm
from tightwire.kernels.spec.layer_ops import add_rms_norm_reference, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the order of one sum over D, which moves the float32 scale by some roundings.

    That may tip the first rounding to the dtype over; the weight then scales it, and rounds again.
    """
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(want.dtype).eps
    bound = want.float().abs() * (8 * eps32 + (2 * eps if want.dtype != torch.float32 else 0.0))
    assert ((got.float() - want.float()).abs() <= bound).all()
    if want.dtype != torch.float32:
        assert (got == want).float().mean() > 0.99  # a rounding tips over seldom


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 576), (3, 16), (5, 37), (2, 7), (700, 576)])
def test_matches_the_reference(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    x = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual = x.flip(0) * 3

    _assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    want_normed, want_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(total, want_total)
    _assert_close(normed, want_normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, num_threads: Callable[[int], None]) -> None:
    x = torch.randn(700, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    num_threads(2)
    whole = rms_norm(x, weight, 1e-6)
    num_threads(1)
    for row in (0, 1, 350, 699):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row])


def test_a_view_is_read_without_a_copy_and_not_changed() -> None:
    wide = torch.randn(4, 100)
    before = wide.clone()
    x = wide[:, 10:60]
    weight = torch.ones(50)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x.contiguous(), weight, 1e-5))
    assert torch.equal(add_rms_norm(x, x, weight, 1e-5)[1], x * 2)
    assert torch.equal(wide, before)


def test_no_rows() -> None:
    assert rms_norm(torch.zeros(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 8), torch.ones(7), "weight (D,); got (2, 8), (2, 8) and (7,)"),
        (torch.zeros(8, 2).T, torch.ones(8), "contiguous rows"),
        (
            torch.zeros(2, 8, dtype=torch.float64),
            torch.ones(8, dtype=torch.float64),
            "torch.float16; got torch.float64",
        ),
        (torch.zeros(2, 8), torch.ones(8, dtype=torch.bfloat16), "got torch.float32, torch.float32 and torch.bfloat16"),
    ],
)
def test_arguments_that_do_not_match_are_refused(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rms_norm(x, weight, 1e-5)
