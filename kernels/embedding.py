"""Rows of the embedding table by token, from a table of plain numbers or a packed one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.packed import Matrix, PackedMatrix
from tightwire.kernels.spec.unpack import dequantize


def embedding(token_ids_T: Tensor, table_VD: Matrix, dtype: torch.dtype) -> Tensor:
    """(T, D) in ``dtype``, a new tensor; of a packed table only these rows are unpacked."""
    if isinstance(table_VD, PackedMatrix):
        return dequantize(table_VD.take(token_ids_T), dtype)
    return F.embedding(token_ids_T, table_VD).to(dtype)
