"""Root-mean-square normalization on a GPU: one pass over memory, one program per row.

The residual sum, if any, is rounded to the numbers' type before it is stored and normalized, as in torch.
"""

# Type checkers cannot follow a kernel's body: constants have the attributes of the objects they stand for.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.numbers import narrowed, raw, widened

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_ROW_ELEMS = 1 << 16  # a row is held in the registers of one program


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute ``norm.rms_norm_reference``; only the order of the float32 sum over D and the root's last bit differ.

    Raises:
        ValueError: shapes or dtypes do not match, or rows are too long for a program.
    """
    _check(x_TD, x_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _run(x_TD, x_TD, weight_D, out_TD, out_TD, eps, adds=False)
    return out_TD


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``norm.add_rms_norm_reference``: the normalized sum and the sum itself, both new tensors."""
    _check(x_TD, residual_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    sum_TD = torch.empty_like(out_TD)
    _run(x_TD, residual_TD, weight_D, out_TD, sum_TD, eps, adds=True)
    return out_TD, sum_TD


def _check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if residual.shape != x.shape or weight.shape != x.shape[1:] or x.stride(1) != 1 or residual.stride(1) != 1:
        raise ValueError(
            "rms_norm needs x and residual (T, D) with contiguous rows and weight (D,); "
            f"got {tuple(x.shape)}, {tuple(residual.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype not in _NUMBERS or weight.dtype != x.dtype or residual.dtype != x.dtype or weight.stride(0) != 1:
        raise ValueError(
            f"rms_norm needs x, residual and weight in one of {', '.join(map(str, _NUMBERS))}; "
            f"got {x.dtype}, {residual.dtype} and {weight.dtype}"
        )
    if x.shape[1] > _MAX_ROW_ELEMS:
        raise ValueError(f"rms_norm takes rows of at most {_MAX_ROW_ELEMS} numbers, got {x.shape[1]}")


def _run(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, adds: bool) -> None:
    num_rows, size = x.shape
    if num_rows:
        given = x, residual, weight, out, total, x.stride(0), residual.stride(0), size, eps
        launch(_rms_norm_row, num_rows, x.device, *given, adds, triton.next_power_of_2(size))


@triton.jit(do_not_specialize=["eps"])
def _rms_norm_row(
    x, residual, weight, out, total, x_stride, residual_stride, size, eps, ADDS: tl.constexpr, PLACES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    kept = place < size
    dtype: tl.constexpr = x.dtype.element_ty
    value = widened(tl.load(raw(x) + row * x_stride + place, mask=kept, other=0))
    if ADDS:
        value += widened(tl.load(raw(residual) + row * residual_stride + place, mask=kept, other=0))
        stored = narrowed(value, dtype)
        tl.store(raw(total) + row * size + place, stored, mask=kept)
        value = widened(stored)
    mean = tl.sum(value * value, 0) / size
    normed = widened(narrowed(value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)), dtype))
    factor = widened(tl.load(raw(weight) + place, mask=kept, other=0))
    tl.store(raw(out) + row * size + place, narrowed(normed * factor, dtype), mask=kept)
