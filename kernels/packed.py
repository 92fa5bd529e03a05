"""Packed matrices back to floats: whole, or the rows of an embedding table by token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.linear import interleave_cpu, unpack_cpu
from tightwire.kernels.cpu.run import NUMBER_KIND
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, StackedMatrix, Weight, dequantize_reference


def dequantize(matrix: Weight, dtype: torch.dtype) -> Tensor:
    """``dequantize_reference``, to the bit but for a NaN's; of a plain matrix, the conversion."""
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    if isinstance(matrix, StackedMatrix):
        return torch.cat([dequantize(part, dtype) for part in matrix.parts])
    if matrix.device.type == "cuda":
        return triton_kernels().unpack_packed(matrix, dtype)
    return unpack_cpu(matrix, dtype) if dtype in NUMBER_KIND and available() else dequantize_reference(matrix, dtype)


def triton_kernels() -> Any:
    """The module of packed weights on a GPU, imported on first use: a CPU host need not have Triton."""
    from tightwire.kernels.cuda import linear_packed

    return linear_packed


def embedding(token_ids_T: Tensor, table_VD: Matrix, dtype: torch.dtype) -> Tensor:
    """Look rows of a table up by token: (T, D) in ``dtype``, a new tensor. Of a packed table only these rows are unpacked."""
    if isinstance(table_VD, PackedMatrix):
        if table_VD.interleaved:
            wrong_T = token_ids_T[(token_ids_T < 0) | (token_ids_T >= table_VD.shape[0])]
            if len(wrong_T):
                raise IndexError(f"index {int(wrong_T[0])} of a table of {table_VD.shape[0]} rows")
            return unpack_cpu(table_VD, dtype, token_ids_T.long().contiguous())
        return dequantize(table_VD.take(token_ids_T), dtype)
    return F.embedding(token_ids_T, table_VD).to(dtype)


def arrange(matrix: Weight) -> Weight:
    """The same matrix, its bytes moved in place to where products read them fastest. Nobody else may read them.

    On a GPU by plane, on a CPU with compiled kernels interleaved if it is for activations in 8 bits, else as they are.
    """
    if isinstance(matrix, StackedMatrix):
        return StackedMatrix(tuple(part for part in map(arrange, matrix.parts) if isinstance(part, PackedMatrix)))
    if isinstance(matrix, Tensor):
        return matrix
    if matrix.device.type == "cuda":
        from tightwire.kernels.cuda.packed_blocks import order_by_plane

        return order_by_plane(matrix)
    return interleave_cpu(matrix) if matrix.format.int8_activations and available() else matrix
