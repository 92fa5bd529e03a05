"""Packed matrices back to floats."""

import torch
from torch import Tensor

from tightwire.kernels.cpu.packed import unpack_rows
from tightwire.kernels.cpu.vector.simd import NUMBER_KIND
from tightwire.kernels.cpu.vector.threads import run_on_rows
from tightwire.kernels.packed import Matrix, dequantize_reference
from tightwire.kernels.spec.packed_format import GROUP_ELEMS


def dequantize(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """``dequantize_reference``, to the bit but for a NaN's; of a plain matrix, the conversion."""
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    if matrix.device.type != "cpu" or dtype not in NUMBER_KIND:
        return dequantize_reference(matrix, dtype)
    num_rows, num_columns = matrix.shape
    out_OD = torch.empty(num_rows, num_columns, dtype=dtype)
    arguments = (
        out_OD.data_ptr(),
        NUMBER_KIND[dtype],
        matrix.format.kind,
        matrix.blocks_OB.data_ptr(),
        matrix.blocks_OB.stride(0),
        num_columns // GROUP_ELEMS,
    )
    run_on_rows(unpack_rows, arguments, num_rows, num_columns)
    return out_OD
