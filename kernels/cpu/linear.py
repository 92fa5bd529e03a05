"""Matrix products on CPU whose rows do not depend on how many there are, and unpacking of packed weights.

The host of native/linear.cpp. torch's product reads the weights at half the memory's speed when there are few rows, and in
float32 it gives a row other bits when it is alone. Here an output's bits depend on its row of x and its row of weights only,
not on the number of rows or threads.

On CPUs with AVX512-BF16 bfloat16 numbers are multiplied as they are, in pairs; elsewhere they are widened to float32.
Packed weights give the bits of the same numbers in float32, or in bfloat16 where bfloat16 is multiplied in pairs.
"""

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import has_pairs, lib, struct
from tightwire.kernels.cpu.run import NUMBER_KIND, run_on_items, run_on_rows
from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.kernels.spec.packed_format import GROUP_ELEMS, PACKED_FORMATS

# One thread multiplies with this many weights (with eight rows, or waiting for memory with fewer) in about 100 us.
_WORK_PER_THREAD = 1 << 20


def linear_cpu(x_TD: Tensor, weight_OD: Matrix, bias_O: Tensor | None) -> Tensor:
    """``linear.linear`` for CPU tensors; see there."""
    return _product(x_TD, weight_OD, bias_O, x_TD.dtype)


def linear_to_float_cpu(x_TD: Tensor, weight_OD: Matrix) -> Tensor:
    """``linear.linear_to_float`` for CPU tensors; see there."""
    return _product(x_TD, weight_OD, None, torch.float32)


def _product(x_TD: Tensor, weight_OD: Matrix, bias_O: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """A bias must be of ``out_dtype``."""
    _check(x_TD, weight_OD, bias_O)
    num_tokens, num_inputs = x_TD.shape
    num_outputs = weight_OD.shape[0]
    out_TO = torch.empty((num_tokens, num_outputs), dtype=out_dtype)
    in_pairs = x_TD.dtype == torch.bfloat16 and has_pairs()
    if not in_pairs:
        x_TD = x_TD.float()
    weight, weight_stride, weight_kind = matrix_integers(weight_OD)
    arguments = (
        out_TO.data_ptr(),
        x_TD.data_ptr(),
        weight,
        0 if bias_O is None else bias_O.data_ptr(),
        x_TD.stride(0) * x_TD.element_size(),
        weight_stride,
        weight_kind,
        num_tokens,
        num_outputs,
        num_inputs,
        NUMBER_KIND[out_dtype],
        in_pairs,
    )
    panel = lib.tw_panel()
    max_threads = min(-(-num_outputs // panel), useful_threads(num_tokens, num_outputs * num_inputs))
    run_on_items("tw_linear", struct("tw_linear_args", arguments), num_outputs, panel, max_threads)
    return out_TO


def matrix_integers(weight_OD: Matrix) -> tuple[int, int, int]:
    """A matrix as kernels know it: address, bytes from row to row, kind of its numbers or blocks."""
    if isinstance(weight_OD, PackedMatrix):
        return weight_OD.blocks_OB.data_ptr(), weight_OD.blocks_OB.stride(0), weight_OD.format.kind
    return weight_OD.data_ptr(), weight_OD.stride(0) * weight_OD.element_size(), NUMBER_KIND[weight_OD.dtype]


def useful_threads(num_rows: int, num_weights: int) -> int:
    """The number of threads worth waking to multiply rows with weights, of one matrix or of several."""
    return 1 + num_weights * (num_rows + 7) // 8 // _WORK_PER_THREAD


def _check(x: Tensor, weight: Matrix, bias: Tensor | None) -> None:
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape[0] != weight.shape[0]):
        raise ValueError(
            "linear needs x (T, D), weight (O, D) and bias (O,) or None; "
            f"got {tuple(x.shape)}, {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
        )
    stored = weight.format.name if isinstance(weight, PackedMatrix) else weight.dtype
    if (
        x.dtype not in NUMBER_KIND
        or stored not in (x.dtype, *PACKED_FORMATS)
        or (bias is not None and bias.dtype != x.dtype)
    ):
        raise ValueError(
            f"linear needs x, weight (unless packed) and bias in one of {', '.join(map(str, NUMBER_KIND))}; "
            f"got {x.dtype}, {stored} and {None if bias is None else bias.dtype}"
        )
    strides = weight.blocks_OB.stride() if isinstance(weight, PackedMatrix) else weight.stride()
    if x.stride(1) != 1 or strides[1] != 1 or (bias is not None and bias.stride(0) != 1):
        raise ValueError(f"linear needs contiguous rows; got strides {x.stride()} and {strides}")


def unpack_cpu(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """``packed.dequantize`` for CPU tensors and a dtype of ``NUMBER_KIND``."""
    num_rows, num_columns = matrix.shape
    out_OD = torch.empty(num_rows, num_columns, dtype=dtype)
    blocks, row_stride, kind = matrix_integers(matrix)
    arguments = (out_OD.data_ptr(), blocks, NUMBER_KIND[dtype], kind, row_stride, num_columns // GROUP_ELEMS)
    run_on_rows("tw_unpack", struct("tw_unpack_args", arguments), num_rows, num_columns)
    return out_OD
