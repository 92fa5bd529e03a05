"""Norms and SwiGLU for GPUs in Triton's interpreter: the residual sum to the bit, the rest within the roundings of its type."""

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.layer_ops import (
    NormForm,
    SumNorms,
    add_rms_norm_reference,
    rms_norm_reference,
    swiglu_reference,
)

pytestmark = needs_triton

EPS = NormForm(1e-5)


def _check_norm(group: Group) -> None:
    from tightwire.kernels.cuda import layer_ops

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_rows, size in ((1, 1), (3, 100), (2, 576)):
            weight = torch.randn(size, generator=generator).to(dtype)
            for sum_dtype in {dtype, torch.float32}:
                padded = torch.randn(num_rows, size + 7, generator=generator).to(sum_dtype)
                x, residual = padded[:, :size], torch.randn(num_rows, size, generator=generator).to(sum_dtype)
                out, total = layer_ops.add_rms_norm(x, residual, SumNorms(weight, EPS))
                want, want_total = add_rms_norm_reference(x, residual, SumNorms(weight, EPS))
                assert torch.equal(total, want_total) and total.dtype == sum_dtype, f"{dtype} {size}"
                assert out.dtype == dtype
                _assert_norm_close(out, want)
                _assert_norm_close(
                    layer_ops.add_rms_norm(x, None, SumNorms(weight, EPS))[0], rms_norm_reference(x, weight, EPS)
                )


def _assert_norm_close(out: torch.Tensor, want: torch.Tensor) -> None:
    """The order of the sum moves the float32 scale, so the result may round to the next number of the type."""
    unit = torch.finfo(out.dtype).eps
    order = out.shape[1] * torch.finfo(torch.float32).eps
    assert bool(((out.double() - want.double()).abs() <= (unit + order) * want.double().abs()).all())


def _check_norm_refusals(group: Group) -> None:
    from tightwire.kernels.cuda import layer_ops

    with pytest.raises(ValueError, match="at most 65536"):
        layer_ops.add_rms_norm(torch.ones(1, 65537), None, SumNorms(torch.ones(65537), EPS))


def test_norm_in_the_interpreter(interpreted: InterpretedRank) -> None:
    interpreted(_check_norm)


def test_norm_of_rows_that_are_too_long_is_refused(interpreted: InterpretedRank) -> None:
    interpreted(_check_norm_refusals)


HARD_GATES = [0.0, -0.0, 1e-40, 20.0, 80.0, 88.0, 89.0, 1e30, -20.0, -80.0, -88.0, -89.0, -1e30, float("inf")]


def _assert_swiglu_close(gate_up: Tensor) -> None:
    """The exponential is off by |gate| units of float32, which in 16 bits seldom changes how the product rounds.

    Below the smallest normal numbers of float32 a unit is no share of the number.
    """
    from tightwire.kernels.cuda.layer_ops import swiglu

    got, want = swiglu(gate_up), swiglu_reference(gate_up)
    assert got.dtype == want.dtype and got.is_contiguous()
    gates = gate_up.chunk(2, -1)[0].float().abs().clamp(max=100)
    units = (gates + 8) * torch.finfo(torch.float32).eps
    if want.dtype != torch.float32:
        units = units + torch.finfo(want.dtype).eps
        assert float((got == want).float().mean()) > 0.99
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    error, bound = (got.double() - want.double()).abs(), want.double().abs() * units + 1e-35
    assert bool((error <= bound)[~infinite].all())


def _check_swiglu(group: Group) -> None:
    from tightwire.kernels.cuda.layer_ops import swiglu

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_tokens, width in ((1, 1536), (3, 16), (5, 37), (2, 7), (4, 2500)):
            gate_up = (torch.randn(num_tokens, 2 * width + 3, generator=generator) * 5).to(dtype)
            _assert_swiglu_close(gate_up[:, : 2 * width])
    gates = torch.tensor(HARD_GATES)
    _assert_swiglu_close(torch.cat((gates, torch.ones_like(gates)))[None])
    assert swiglu(torch.tensor([[float("nan"), 1.0]])).isnan().all()
    assert swiglu(torch.zeros(0, 8)).shape == (0, 4)


def test_swiglu_in_the_interpreter(interpreted: InterpretedRank) -> None:
    interpreted(_check_swiglu)
