"""SwiGLU for GPUs in Triton's interpreter: errors within its roundings, also at the ends of float32."""

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.layer_ops import swiglu_reference

pytestmark = needs_triton

HARD_GATES = [0.0, -0.0, 1e-40, 20.0, 80.0, 88.0, 89.0, 1e30, -20.0, -80.0, -88.0, -89.0, -1e30, float("inf")]


def _assert_close(gate_up: Tensor) -> None:
    """The exponential is off by |gate| units of float32, which in 16 bits seldom tips silu's rounding; the product rounds
    again. Below the smallest normal numbers of float32 a unit is no share of the number.
    """
    from tightwire.kernels.cuda.swiglu import swiglu

    got, want = swiglu(gate_up), swiglu_reference(gate_up)
    assert got.dtype == want.dtype and got.is_contiguous()
    gates = gate_up.chunk(2, -1)[0].float().abs().clamp(max=100)
    units = (gates + 8) * torch.finfo(torch.float32).eps
    if want.dtype != torch.float32:
        units = units + 2 * torch.finfo(want.dtype).eps
        assert float((got == want).float().mean()) > 0.99
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    error, bound = (got.double() - want.double()).abs(), want.double().abs() * units + 1e-35
    assert bool((error <= bound)[~infinite].all())


def _check(group: Group) -> None:
    from tightwire.kernels.cuda.swiglu import swiglu

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_tokens, width in ((1, 1536), (3, 16), (5, 37), (2, 7), (4, 2500)):
            gate_up = (torch.randn(num_tokens, 2 * width + 3, generator=generator) * 5).to(dtype)
            _assert_close(gate_up[:, : 2 * width])
    gates = torch.tensor(HARD_GATES)
    _assert_close(torch.cat((gates, torch.ones_like(gates)))[None])
    assert swiglu(torch.tensor([[float("nan"), 1.0]])).isnan().all()
    assert swiglu(torch.zeros(0, 8)).shape == (0, 4)


def _check_refusals(group: Group) -> None:
    from tightwire.kernels.cuda.swiglu import swiglu

    for gate_up, message in (
        (torch.zeros(2, 7), "swiglu needs"),
        (torch.zeros(8, 2).T, "contiguous rows"),
        (torch.zeros(2, 8, dtype=torch.float64), "torch.float16; got"),
    ):
        with pytest.raises(ValueError, match=message):
            swiglu(gate_up)


def test_in_the_interpreter(interpreted: InterpretedRank) -> None:
    interpreted(_check)


def test_arguments_that_do_not_match_are_refused(interpreted: InterpretedRank) -> None:
    interpreted(_check_refusals)
