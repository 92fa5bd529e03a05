import re
from collections.abc import Callable

import pytest
import torch

from tightwire.kernels.spec.layer_ops import swiglu_reference
from tightwire.kernels.swiglu import swiglu


def _assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """silu within some roundings of float32; in 16 bits that seldom tips its rounding, and the product rounds again."""
    eps32, eps = torch.finfo(torch.float32).eps, torch.finfo(want.dtype).eps
    bound = want.float().abs() * (8 * eps32 + (2 * eps if want.dtype != torch.float32 else 0.0)) + 1e-35
    assert ((got.float() - want.float()).abs() <= bound).all()
    if want.dtype != torch.float32:
        assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1536), (3, 16), (5, 37), (2, 7), (200, 1536)])
def test_matches_the_reference(dtype: torch.dtype, num_tokens: int, width: int) -> None:
    gate_up = (torch.randn(num_tokens, 2 * width, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    _assert_close(swiglu(gate_up), swiglu_reference(gate_up))
    half = gate_up[:, : width // 2 * 2]
    _assert_close(swiglu(half), swiglu_reference(half))


def test_gates_of_all_float32_magnitudes() -> None:
    gates = torch.tensor([0.0, -0.0, 1e-40, 20.0, 80.0, 88.0, 89.0, 1e30, -20.0, -80.0, -88.0, -89.0, -1e30])
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    _assert_close(swiglu(gate_up), swiglu_reference(gate_up))
    assert swiglu(torch.tensor([[float("inf"), 2.0]])).item() == float("inf")


def test_nan_stays_nan() -> None:
    assert swiglu(torch.tensor([[float("nan"), 1.0]])).isnan().all()


def test_a_row_does_not_depend_on_the_others(num_threads: Callable[[int], None]) -> None:
    gate_up = torch.randn(300, 3072).bfloat16()
    num_threads(2)
    whole = swiglu(gate_up)
    num_threads(1)
    for row in (0, 150, 299):
        assert torch.equal(swiglu(gate_up[row : row + 1])[0], whole[row])


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 7), "swiglu needs (T, 2F)"),
        (torch.zeros(8, 2).T, "contiguous rows"),
        (torch.zeros(2, 8, dtype=torch.float64), "torch.float16; got (2, 8) torch.float64"),
    ],
)
def test_arguments_that_do_not_match_are_refused(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        swiglu(gate_up)
