"""Matrix product with weights stored (out, in), as plain numbers or packed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.linear import gated_linear_cpu, linear_cpu
from tightwire.kernels.layer_ops import swiglu
from tightwire.kernels.packed import dequantize, triton_kernels
from tightwire.kernels.spec.layer_ops import linear_reference
from tightwire.kernels.spec.packed import PackedMatrix, StackedMatrix, Weight

# torch lets a GPU round the parts of a long sum to 16 bits, where float16 may overflow.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

# Numbers of packed weights that are unpacked at a time for torch's product: 32 MiB of 16 bits, and enough rows for all its units.
_UNPACKED_ELEMS = 1 << 24


def linear(
    x_TD: Tensor,
    weight_OD: Weight,
    bias_O: Tensor | None = None,
    *,
    num_decode_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, summed in float32 and rounded once to the dtype of x or ``out_dtype``.

    On CPU a row's bits depend on that row alone, so a sequence gets the same logits in any batch. torch's product has
    that property in bfloat16 (but for a single row) and not in float32, and it wastes bandwidth when rows are few
    (1 to 16 rows: 1.6 to 1.8 times this kernel's time in bfloat16 on a Zen 5 core, 1.5 to 2.2 in float32).

    Packed weights stay packed in memory. On CPU the result is that of the same numbers in float32, bit for bit, then rounded; but
    a CPU that multiplies bfloat16 (AVX512-BF16, AMX) rounds the weights to it first if x is bfloat16. On a GPU they are rounded to
    x's dtype for prefill rows, and not for decode rows. A format with ``int8_activations`` is multiplied as in ``spec.packed_int8``.

    Args:
        num_decode_rows: on a GPU, the number of decode rows, which come first; the others are prefill rows. By default all are
            decode rows. Packed weights are unpacked in registers for decode rows, which are few, and in memory for prefill
            rows. So a row's kernel depends on its kind, and not on the number of rows in the batch.
        out_dtype: float32 keeps the sums as they are.
    Raises:
        ValueError: on CPU, shapes or dtypes that do not match, or rows that are not contiguous.
    """
    if isinstance(weight_OD, StackedMatrix):
        sizes = [part.shape[0] for part in weight_OD.parts]
        biases = [None] * len(sizes) if bias_O is None else bias_O.split(sizes)
        given = {"num_decode_rows": num_decode_rows, "out_dtype": out_dtype}
        pairs = zip(weight_OD.parts, biases, strict=True)
        return torch.cat([linear(x_TD, part, bias, **given) for part, bias in pairs], 1)
    if x_TD.device.type == "cpu":
        return (linear_cpu if available() else linear_reference)(x_TD, weight_OD, bias_O, out_dtype)
    if isinstance(weight_OD, Tensor):
        return _torch_product(x_TD, weight_OD, bias_O, out_dtype or x_TD.dtype)
    if num_decode_rows is None or num_decode_rows >= len(x_TD):
        return triton_kernels().linear_packed(x_TD, weight_OD, bias_O, out_dtype)
    if num_decode_rows == 0:
        return _unpacked_product(x_TD, weight_OD, bias_O, out_dtype or x_TD.dtype)
    decode_TO = triton_kernels().linear_packed(x_TD[:num_decode_rows], weight_OD, bias_O, out_dtype)
    prefill_TO = _unpacked_product(x_TD[num_decode_rows:], weight_OD, bias_O, out_dtype or x_TD.dtype)
    return torch.cat([decode_TO, prefill_TO])


def gated_linear(
    x_TD: Tensor, weight_ED: Weight, bias_E: Tensor | None = None, *, num_decode_rows: int, gelu: bool = False
) -> Tensor:
    """``swiglu`` of ``linear``, bit for bit; one pass where the CPU can."""
    if x_TD.device.type == "cpu" and available():
        gated_TF = gated_linear_cpu(x_TD, weight_ED, bias_E, gelu=gelu)
        if gated_TF is not None:
            return gated_TF
    return swiglu(linear(x_TD, weight_ED, bias_E, num_decode_rows=num_decode_rows), gelu=gelu)


def _torch_product(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if x_TD.is_cuda and out_dtype != x_TD.dtype:
        product_TO = torch.mm(x_TD, weight_OD.t(), out_dtype=out_dtype)
        return product_TO if bias_O is None else product_TO + bias_O
    return F.linear(x_TD, weight_OD, bias_O).to(out_dtype)


def _unpacked_product(x_TD: Tensor, weight_OD: PackedMatrix, bias_O: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """torch's product for some rows of the weights at a time."""
    num_outputs, num_inputs = weight_OD.shape
    at_once = max(1, _UNPACKED_ELEMS // num_inputs)
    sums_TO = x_TD.new_empty(len(x_TD), num_outputs, dtype=out_dtype)
    for first in range(0, num_outputs, at_once):
        stop = min(first + at_once, num_outputs)
        bias = None if bias_O is None else bias_O[first:stop]
        weight = dequantize(weight_OD.rows(first, stop), x_TD.dtype)
        sums_TO[:, first:stop] = _torch_product(x_TD, weight, bias, out_dtype)
    return sums_TO
