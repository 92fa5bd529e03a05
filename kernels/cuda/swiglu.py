"""The MLP's activation on a GPU: one pass over memory."""

# Type checkers cannot follow a kernel's body: constants have the attributes of the objects they stand for.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch
from tightwire.kernels.cuda.numbers import narrowed, raw, widened

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAM_ELEMS = 1024  # a vector of eight 16-bit numbers for each of 128 threads


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """Compute ``swiglu.swiglu_reference``, with the same rounding steps; the result is contiguous.

    The error of exp(-gate), and so of silu, is ``|gate|`` units of float32: silu loses some digits for large negative
    gates, where it is nearly 0.

    Raises:
        ValueError: an odd number of columns, non-contiguous rows, or a dtype without a kernel.
    """
    num_tokens, columns = gate_up_T2F.shape
    if columns % 2 or gate_up_T2F.dtype not in _NUMBERS or gate_up_T2F.stride(1) != 1:
        raise ValueError(
            f"swiglu needs (T, 2F) with contiguous rows in one of {', '.join(map(str, _NUMBERS))}; "
            f"got {tuple(gate_up_T2F.shape)} {gate_up_T2F.dtype} with strides {gate_up_T2F.stride()}"
        )
    width = columns // 2
    out_TF = torch.empty((num_tokens, width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    parts = -(-width // _PROGRAM_ELEMS)
    if out_TF.numel():
        given = gate_up_T2F, out_TF, gate_up_T2F.stride(0), width, parts, _PROGRAM_ELEMS
        launch(_swiglu_part, num_tokens * parts, out_TF.device, *given)
    return out_TF


@triton.jit
def _swiglu_part(gate_up, out, row_stride, width, parts, PLACES: tl.constexpr):
    row = (tl.program_id(0) // parts).to(tl.int64)
    place = tl.program_id(0) % parts * PLACES + tl.arange(0, PLACES)
    kept = place < width
    gates = raw(gate_up) + row * row_stride
    dtype: tl.constexpr = out.dtype.element_ty
    gate = widened(tl.load(gates + place, mask=kept, other=0))
    up = widened(tl.load(gates + width + place, mask=kept, other=0))
    silu = widened(narrowed(tl.div_rn(gate, 1.0 + tl.exp(-gate)), dtype))
    tl.store(raw(out) + row * width + place, narrowed(silu * up, dtype), mask=kept)
