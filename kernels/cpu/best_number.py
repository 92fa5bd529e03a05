"""The best number of each row and its column, as one integer that sorts as they do: what ranks compare their logits by.

On CPU one pass per row; torch takes nine operations, each of them a cold start behind a step's weights.
"""

import math

import torch
from torch import Tensor

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import helper, kernel
from tightwire.kernels.cpu.vector.numbers import load_numbers
from tightwire.kernels.cpu.vector.simd import FLOAT32, LANES, load_i32, load_scalar, store_i64

MAX_ID = (1 << 31) - 1

_NAN_BITS = 0x7FC0_0000
_MINUS_ZERO = -(1 << 31)
_BLOCK = 1024  # numbers after which the best so far is compared; only the best one's are looked through again


def best_keys_reference(x_RV: Tensor, first_id: int) -> Tensor:
    """(R,) keys of each row's best number; ids count up from ``first_id`` in column 0. A NaN is the best of all."""
    best_R, column_R = x_RV.max(-1)
    return keys_of(best_R.float(), column_R + first_id)


def keys_of(numbers: Tensor, ids: Tensor) -> Tensor:
    """int64 of the same shape: a float32's bits, so turned that they sort as it does, above the id turned around.

    Keys are unique, and of equal numbers the lowest id has the largest.
    """
    # Plus zero, so that zeros of either sign are equal.
    bits = torch.where(numbers.isnan(), _NAN_BITS, (numbers + 0.0).view(torch.int32)).long()
    return torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits) << 32 | (MAX_ID - ids)


def best_keys(x_RV: Tensor, first_id: int) -> Tensor:
    """``best_keys_reference``, to the bit; on CPU by a kernel for float32 in contiguous rows."""
    if x_RV.device.type != "cpu" or x_RV.dtype != torch.float32 or x_RV.stride(1) != 1:
        return best_keys_reference(x_RV, first_id)
    num_rows, num_columns = x_RV.shape
    keys_R = torch.empty(num_rows, dtype=torch.int64)
    _best_keys(keys_R.data_ptr(), x_RV.data_ptr(), 4 * x_RV.stride(0), num_rows, num_columns, first_id)
    return keys_R


@kernel
def _best_keys(keys: int, x: int, stride: int, num_rows: int, num_columns: int, first_id: int) -> None:
    for row in range(num_rows):
        numbers = x + row * stride
        column = _best_finite(numbers, num_columns)
        if column < 0:
            column = _best_of_any(numbers, num_columns)
        key = _sorting(numbers + 4 * column) << 32 | (MAX_ID - first_id - column)
        store_i64(keys + 8 * row, key)


@helper
def _best_finite(x: int, num_columns: int) -> int:
    """The column of the first of the largest; -1 when a number is infinite or NaN."""
    best, best_block = -math.inf, 0
    zero = simd.splat(0.0)
    unlike_zero = zero
    for start in range(0, num_columns, _BLOCK):
        block_best = simd.splat(-math.inf)
        for at in range(start, min(start + _BLOCK, num_columns), LANES):
            count = num_columns - at
            numbers = load_numbers(x + 4 * at, FLOAT32, count)
            unlike_zero = simd.fma(numbers, zero, unlike_zero)  # NaN from the first infinity or NaN on
            block_best = simd.maximum(simd.keep_first(numbers, count, -math.inf), block_best)
        largest = simd.max_lanes(block_best)
        if largest > best:
            best, best_block = largest, start
    if simd.sum_lanes(unlike_zero) != 0.0:
        return -1
    column = best_block
    while load_scalar(x + 4 * column) != best:
        column += 1
    return column


@helper
def _best_of_any(x: int, num_columns: int) -> int:
    column, best = 0, _sorting(x)
    for at in range(1, num_columns):
        number = _sorting(x + 4 * at)
        if number > best:
            column, best = at, number
    return column


@helper
def _sorting(address: int) -> int:
    """A float32's bits as an integer that sorts as it does."""
    bits = load_i32(address)
    if bits == _MINUS_ZERO:
        bits = 0
    if bits & 0x7FFF_FFFF > 0x7F80_0000:
        bits = _NAN_BITS
    return bits ^ 0x7FFF_FFFF if bits < 0 else bits
