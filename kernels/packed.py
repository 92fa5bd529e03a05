"""Packed matrices back to floats: whole, or the rows of an embedding table by token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.cpu.packed import unpack_rows
from tightwire.kernels.cpu.vector.simd import NUMBER_KIND
from tightwire.kernels.cpu.vector.threads import run_on_rows
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, dequantize_reference
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


def embedding(token_ids_T: Tensor, table_VD: Matrix, dtype: torch.dtype) -> Tensor:
    """(T, D) in ``dtype``, a new tensor; of a packed table only these rows are unpacked."""
    if isinstance(table_VD, PackedMatrix):
        return dequantize(table_VD.take(token_ids_T), dtype)
    return F.embedding(token_ids_T, table_VD).to(dtype)
