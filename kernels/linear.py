"""Matrix product with weights stored (out, in), as plain numbers or packed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.cpu.library import available, has_pairs
from tightwire.kernels.cpu.linear import linear_cpu
from tightwire.kernels.cpu.linear_widened import (
    linear_widened,
    rows_are_independent,
    torch_has_bfloat16_products,
    torch_has_matrix_units,
)
from tightwire.kernels.packed import dequantize
from tightwire.kernels.spec.layer_ops import linear_reference
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, StackedMatrix, Weight

# Numbers of packed weights that are unpacked at a time for torch's product: little memory next to a model.
_UNPACKED_ELEMS = 1 << 22


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

    Packed weights stay packed in memory. On CPU the result is that of the same numbers in float32, bit for bit, and rounded;
    but when the CPU multiplies bfloat16 in pairs (AVX512-BF16) and x is bfloat16, the weights are rounded to it first. For
    decode rows they are unpacked in registers. A format with ``int8_activations`` is multiplied as in ``spec.packed_int8``.

    Args:
        num_decode_rows: the number of decode rows, which come first, one or a few at a time. The rest are prefill rows,
            many at a time. In bfloat16 on CPU these go to torch where it is faster: with matrix units, and with plain
            weights unless ``out_dtype`` is float32; widened to float32 where the CPU has no bfloat16 units. A row's kernel
            must depend on its kind and not on the number of rows in the batch. By default all are.
        out_dtype: float32 keeps the sums as they are, except those of matrix units, which torch has rounded.
    Raises:
        ValueError: on CPU, shapes or dtypes that do not match, or rows that are not contiguous.
    """
    if isinstance(weight_OD, StackedMatrix):
        sizes = [part.shape[0] for part in weight_OD.parts]
        biases = [None] * len(sizes) if bias_O is None else bias_O.split(sizes)
        each = zip(weight_OD.parts, biases, strict=True)
        products = [linear(x_TD, *part, num_decode_rows=num_decode_rows, out_dtype=out_dtype) for part in each]
        return torch.cat(products, 1)
    on_cpu = x_TD.device.type == "cpu"
    if not on_cpu and isinstance(weight_OD, Tensor):
        return _torch_product(x_TD, weight_OD, bias_O, out_dtype or x_TD.dtype)
    if on_cpu and not available():
        return linear_reference(x_TD, weight_OD, bias_O, out_dtype)
    in_int8 = isinstance(weight_OD, PackedMatrix) and weight_OD.format.int8_activations
    one_product = on_cpu and (x_TD.dtype != torch.bfloat16 or in_int8)
    if num_decode_rows is None or num_decode_rows >= len(x_TD) or one_product:
        return _single_product(x_TD, weight_OD, bias_O, out_dtype)
    if num_decode_rows == 0:
        return _block_product(x_TD, weight_OD, bias_O, out_dtype)
    few, block = x_TD[:num_decode_rows], x_TD[num_decode_rows:]
    products = _single_product(few, weight_OD, bias_O, out_dtype), _block_product(block, weight_OD, bias_O, out_dtype)
    return torch.cat(products)


def _single_product(x_TD: Tensor, weight_OD: Matrix, bias_O: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    if x_TD.device.type == "cpu":
        return linear_cpu(x_TD, weight_OD, bias_O, out_dtype)
    return _triton().linear_packed(x_TD, weight_OD, bias_O, out_dtype)


def _block_product(x_TD: Tensor, weight_OD: Matrix, bias_O: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    out_dtype = out_dtype or x_TD.dtype
    widens = x_TD.device.type == "cpu" and not torch_has_bfloat16_products()
    is_packed = isinstance(weight_OD, PackedMatrix)
    # torch's product of vectors is 5 % faster, but it rounds its sums, and unpacked weights pass between the threads.
    has_own = x_TD.device.type == "cpu" and has_pairs() and not torch_has_matrix_units()
    if has_own and (is_packed or out_dtype != x_TD.dtype):
        return linear_cpu(x_TD, weight_OD, bias_O, out_dtype)
    if is_packed:
        return (linear_cpu if widens else _unpacked_product)(x_TD, weight_OD, bias_O, out_dtype)
    if widens:
        return (linear_widened if rows_are_independent() else linear_cpu)(x_TD, weight_OD, bias_O, out_dtype)
    return _torch_product(x_TD, weight_OD, bias_O, out_dtype)


def _torch_product(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if x_TD.is_cuda and out_dtype != x_TD.dtype:
        product_TO = torch.mm(x_TD, weight_OD.t(), out_dtype=out_dtype)
        return product_TO if bias_O is None else product_TO + bias_O
    if len(x_TD) == 1 and not x_TD.is_cuda:  # torch has another kernel, with other bits, for a single row
        return F.linear(x_TD.expand(2, -1), weight_OD, bias_O)[:1].to(out_dtype)
    return F.linear(x_TD, weight_OD, bias_O).to(out_dtype)


def _unpacked_product(x_TD: Tensor, weight_OD: PackedMatrix, bias_O: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """torch's product, with matrix units if there are any, for some rows of the weights at a time."""
    num_outputs, num_inputs = weight_OD.shape
    at_once = max(1, _UNPACKED_ELEMS // num_inputs)
    sums_TO = x_TD.new_empty(len(x_TD), num_outputs, dtype=out_dtype)
    for first in range(0, num_outputs, at_once):
        stop = min(first + at_once, num_outputs)
        bias = None if bias_O is None else bias_O[first:stop]
        weight = dequantize(weight_OD.rows(first, stop), x_TD.dtype)
        sums_TO[:, first:stop] = _torch_product(x_TD, weight, bias, out_dtype)
    return sums_TO


def _triton() -> Any:
    """Imported on first use: a CPU host need not have Triton."""
    from tightwire.kernels.cuda import linear_packed

    return linear_packed
