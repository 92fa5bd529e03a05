"""The product of one row on a GPU together with what lies beside it: the residual's sum and the norm before, SwiGLU after.

So a decode step of one row has three launches a layer less. Each program norms the row for itself while it multiplies: the root
multiplies the finished sums, so that no load of weights waits for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.layer_ops import activated
from tightwire.kernels.cuda.numbers import load_operand, narrowed, raw, widened
from tightwire.kernels.spec.layer_ops import NormForm

# Numbers of a row at a time: 16 bytes for each thread of two warps, and with 16 outputs eight times that.
_PLACES = tl.constexpr(512)
_STAGES = tl.constexpr(3)  # one iteration is multiplied while copies of the next are under way, 16 KB for each program


def norm_linear_row(
    x_1D: Tensor | None,
    residual_1D: Tensor,
    norm_D: Tensor,
    form: NormForm,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    gelu: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``layer_ops.norm_linear_reference``; the order of the float32 sums differs."""
    num_outputs, size = weight_OD.shape
    out_1O = norm_D.new_empty(1, num_outputs if gelu is None else num_outputs // 2)
    sum_1D = residual_1D if x_1D is None else torch.empty_like(residual_1D)
    outputs = next((each for each in (16, 8) if num_outputs >= 256 * each), 4)  # of a program: all processors have some
    given = x_1D, residual_1D, norm_D, weight_OD, bias_O, out_1O, sum_1D, size, num_outputs, weight_OD.stride(0), *form
    launch(_norm_product, -(-num_outputs // outputs), norm_D.device, *given, gelu, outputs)
    return out_1O, sum_1D


@triton.jit(do_not_specialize=["eps", "offset", "scale"])
def _norm_product(
    x,
    residual,
    norm,
    weight,
    bias,
    out,
    total,
    size,
    num_outputs,
    row_stride,
    eps,
    offset,
    scale,
    GELU: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    output_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    kept_O = output_O < num_outputs
    # A gate and its factor are neighbours, so that one program has both.
    row_O = output_O if GELU is None else output_O // 2 + output_O % 2 * (num_outputs // 2)
    rows_O1 = (row_O.to(tl.int64) * row_stride)[:, None]
    sum_OP = tl.zeros((OUTPUTS, _PLACES), tl.float32)
    square_P = tl.zeros((_PLACES,), tl.float32)
    for first in tl.range(0, size, _PLACES, num_stages=_STAGES):
        place_P = first + tl.arange(0, _PLACES)
        kept_P = place_P < size
        weight_OP = load_operand(weight, rows_O1 + place_P[None, :], kept_O[:, None] & kept_P[None, :]).to(tl.float32)
        value_P = widened(tl.load(raw(residual) + place_P, mask=kept_P, other=0))
        if x is not None:
            value_P += widened(tl.load(raw(x) + place_P, mask=kept_P, other=0)) * scale
            stored_P = narrowed(value_P, total.dtype.element_ty)
            tl.store(raw(total) + place_P, stored_P, mask=kept_P & (tl.program_id(0) == 0))
            value_P = widened(stored_P)
        square_P += value_P * value_P
        value_P *= widened(tl.load(raw(norm) + place_P, mask=kept_P, other=0)) + offset
        sum_OP = tl.fma(weight_OP, value_P[None, :], sum_OP)
    root = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(square_P, 0) / size + eps))
    result_O = tl.sum(sum_OP, 1) * root
    if bias is not None:
        result_O += widened(tl.load(raw(bias) + row_O, mask=kept_O, other=0))
    if GELU is not None:
        gate_O, up_O = tl.split(tl.reshape(result_O, (OUTPUTS // 2, 2)))
        result_O = activated(gate_O, GELU) * up_O
        output_O = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        kept_O = output_O < num_outputs // 2
    tl.store(raw(out) + output_O, narrowed(result_O, out.dtype.element_ty), mask=kept_O)
