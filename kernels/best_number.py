"""The best number of each row and its column, as one integer that sorts as they do: ranks compare their logits by it.

On CPU one pass per row. torch takes nine operations, each slow because a step's weights have just filled the caches.
"""

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import available, lib

MAX_ID = (1 << 31) - 1
NAN_BITS = 0x7FC0_0000


def best_keys_reference(x_RV: Tensor, first_id: int) -> Tensor:
    """(R,) keys of each row's best number; ids count up from ``first_id`` in column 0. A NaN is the best of all."""
    best_R, column_R = x_RV.max(-1)
    return keys_of(best_R.float(), column_R + first_id)


def keys_of(numbers: Tensor, ids: Tensor) -> Tensor:
    """int64 of the same shape: float32 bits, changed so that they sort as the numbers do, above the inverted id.

    Keys are unique, and of equal numbers the lowest id has the largest.
    """
    # Plus zero, so that zeros of either sign are equal. Then in place: temporaries of whole vocabularies are large.
    bits = (numbers + 0.0).view(torch.int32).masked_fill_(numbers.isnan(), NAN_BITS)
    bits ^= (bits >> 31).bitwise_and_(0x7FFF_FFFF)
    return bits.long().bitwise_left_shift_(32).bitwise_or_(MAX_ID - ids)


def best_keys(x_RV: Tensor, first_id: int) -> Tensor:
    """``best_keys_reference``, to the bit; on CPU by a kernel for float32 in contiguous rows."""
    if not x_RV.is_cpu or x_RV.dtype != torch.float32 or x_RV.stride(1) != 1 or not x_RV.shape[1] or not available():
        return best_keys_reference(x_RV, first_id)
    num_rows, num_columns = x_RV.shape
    keys_R = torch.empty(num_rows, dtype=torch.int64)
    lib.tw_best_keys(keys_R.data_ptr(), x_RV.data_ptr(), 4 * x_RV.stride(0), num_rows, num_columns, first_id)
    return keys_R
