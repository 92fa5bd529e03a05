"""RMSNorm for GPUs in Triton's interpreter: the sum to the bit, the rest within the roundings that its type makes."""

import pytest
import torch
from helpers.kernels.interpreted import InterpretedRank, needs_triton

from tightwire.comm.group.group import Group
from tightwire.kernels.spec.layer_ops import add_rms_norm_reference, rms_norm_reference

pytestmark = needs_triton

EPS = 1e-5


def _check(group: Group) -> None:
    from tightwire.kernels.cuda import norm as norm_triton

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for num_rows, size in ((1, 1), (3, 100), (2, 576)):
            wide = torch.randn(num_rows, size + 7, generator=generator).to(dtype)
            x, residual = wide[:, :size], torch.randn(num_rows, size, generator=generator).to(dtype)
            weight = torch.randn(size, generator=generator).to(dtype)
            out, total = norm_triton.add_rms_norm(x, residual, weight, EPS)
            want, want_total = add_rms_norm_reference(x, residual, weight, EPS)
            assert torch.equal(total, want_total), f"{dtype} {size}"
            _assert_close(out, want)
            _assert_close(norm_triton.rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


def _assert_close(out: torch.Tensor, want: torch.Tensor) -> None:
    """The float32 scale may be off by the sum's order; so the rounding before the weight may go the other way, by one unit
    of the type, and so may the one after: two units, of numbers up to twice the result where a binade ends.
    """
    unit = torch.finfo(out.dtype).eps
    order = out.shape[1] * torch.finfo(torch.float32).eps
    assert bool(((out.double() - want.double()).abs() <= (2 * unit + order) * want.double().abs()).all())


def _check_refusals(group: Group) -> None:
    from tightwire.kernels.cuda import norm as norm_triton

    with pytest.raises(ValueError, match="contiguous rows"):
        norm_triton.rms_norm(torch.ones(4, 6).t(), torch.ones(4), EPS)
    with pytest.raises(ValueError, match="in one of"):
        norm_triton.rms_norm(torch.ones(4, 6), torch.ones(6).half(), EPS)
    with pytest.raises(ValueError, match="at most 65536"):
        norm_triton.rms_norm(torch.ones(1, 65537), torch.ones(65537), EPS)


def test_add_rms_norm(interpreted: InterpretedRank) -> None:
    interpreted(_check)


def test_arguments_that_do_not_match_are_refused(interpreted: InterpretedRank) -> None:
    interpreted(_check_refusals)
