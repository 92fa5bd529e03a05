"""Matrix product on CPU whose rows do not know how many they are: numba, float32 accumulation.

torch's product reads the weights at half the memory's speed when there are few rows, and in float32 it gives a row
other bits when it is alone. Here inputs and weights are both read along their rows, as they lie, without packing: an
output is sixteen chains of multiply-adds over the inputs, added in a fixed tree, rounded once. Its bits depend on its
row of x and its row of weights, not on the number of rows or threads.

On CPUs with AVX512-BF16 bfloat16 numbers are multiplied as they are, in pairs; elsewhere they are widened on the way.
"""

import torch
from torch import Tensor

from tightwire.kernels import simd
from tightwire.kernels.jit import helper, kernel
from tightwire.kernels.numbers import load_numbers, size_of, store_numbers
from tightwire.kernels.simd import BFLOAT16, FLOAT16, FLOAT32, LANES, NUMBER_KIND
from tightwire.kernels.threads import run_on_threads

_PANEL = 64  # outputs that a thread takes at a time
_MAX_ROWS = 32  # rows of x that are multiplied with one panel before the next rows
_CACHE_BYTES = 96 << 10  # of those rows, to stay in the second-level cache beside the panel

# One thread multiplies with so many weights (with eight rows, or waiting for memory with fewer) in about 100 us.
_WORK_PER_THREAD = 1 << 20

_BF16_PRODUCTS = simd.bf16_products_usable()

_sums = simd.make_stack(_MAX_ROWS * _PANEL)

_float_4x4 = simd.make_tile_dot(4, 4, FLOAT32)
_float_4x1 = simd.make_tile_dot(4, 1, FLOAT32)
_float_2x4 = simd.make_tile_dot(2, 4, FLOAT32)
_float_2x1 = simd.make_tile_dot(2, 1, FLOAT32)
_float_1x4 = simd.make_tile_dot(1, 4, FLOAT32)
_float_1x1 = simd.make_tile_dot(1, 1, FLOAT32)
_bf16_4x4 = simd.make_tile_dot(4, 4, BFLOAT16)
_bf16_4x1 = simd.make_tile_dot(4, 1, BFLOAT16)
_bf16_2x4 = simd.make_tile_dot(2, 4, BFLOAT16)
_bf16_2x1 = simd.make_tile_dot(2, 1, BFLOAT16)
_bf16_1x4 = simd.make_tile_dot(1, 4, BFLOAT16)
_bf16_1x1 = simd.make_tile_dot(1, 1, BFLOAT16)
_f16_4x4 = simd.make_tile_dot(4, 4, FLOAT16)
_f16_4x1 = simd.make_tile_dot(4, 1, FLOAT16)
_f16_2x4 = simd.make_tile_dot(2, 4, FLOAT16)
_f16_2x1 = simd.make_tile_dot(2, 1, FLOAT16)
_f16_1x4 = simd.make_tile_dot(1, 4, FLOAT16)
_f16_1x1 = simd.make_tile_dot(1, 1, FLOAT16)


def linear_cpu(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """``linear.linear`` for CPU tensors; see there."""
    _check(x_TD, weight_OD, bias_O)
    num_tokens, num_inputs = x_TD.shape
    num_outputs = weight_OD.shape[0]
    kind = NUMBER_KIND[weight_OD.dtype]
    out_TO = torch.empty((num_tokens, num_outputs), dtype=x_TD.dtype)
    if kind == FLOAT16 or (kind == BFLOAT16 and not _BF16_PRODUCTS):
        x_TD = x_TD.float()
    max_threads = min(-(-num_outputs // _PANEL), useful_threads(num_tokens, weight_OD.numel()))
    counter = torch.zeros(1, dtype=torch.int64) if max_threads > 1 else None
    x_bytes = x_TD.element_size()
    arguments = (
        out_TO.data_ptr(),
        x_TD.data_ptr(),
        x_TD.stride(0) * x_bytes,
        weight_OD.data_ptr(),
        weight_OD.stride(0) * weight_OD.element_size(),
        0 if bias_O is None else bias_O.data_ptr(),
        num_tokens,
        num_outputs,
        num_inputs,
        kind,
        0 if counter is None else counter.data_ptr(),
    )
    if counter is None:
        multiply(*arguments)
    else:
        run_on_threads(lambda: multiply(*arguments), max_threads)
    return out_TO


def useful_threads(num_rows: int, num_weights: int) -> int:
    """How many threads are worth waking to multiply so many rows with so many weights, one matrix or several."""
    return 1 + num_weights * (num_rows + 7) // 8 // _WORK_PER_THREAD


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape[0] != weight.shape[0]):
        raise ValueError(
            "linear wants x (T, D), weight (O, D) and bias (O,) or None; "
            f"got {tuple(x.shape)}, {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
        )
    if weight.dtype not in NUMBER_KIND or x.dtype != weight.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"linear wants x, weight and bias in one of {', '.join(map(str, NUMBER_KIND))}; "
            f"got {x.dtype}, {weight.dtype} and {None if bias is None else bias.dtype}"
        )
    if x.stride(1) != 1 or weight.stride(1) != 1 or (bias is not None and bias.stride(0) != 1):
        raise ValueError(f"linear wants contiguous rows; got strides {x.stride()} and {weight.stride()}")


@kernel
def multiply(
    out: int,
    x: int,
    x_stride: int,
    weight: int,
    weight_stride: int,
    bias: int,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    kind: int,
    counter: int,
) -> None:
    """Panel after panel until ``counter``, which other threads draw from too, has passed the last.

    With ``counter`` 0 this thread is alone and takes them all. Strides are bytes. ``x`` is as ``prepare_rows`` leaves it.
    """
    x_bytes = size_of(kind) if kind == FLOAT32 or (kind == BFLOAT16 and _BF16_PRODUCTS) else 4
    rows_at_once = max(4, min(_MAX_ROWS, _CACHE_BYTES // (x_bytes * num_inputs + 1) // 4 * 4))
    sums = _sums()
    size = size_of(kind)
    panel = 0
    while True:
        if counter != 0:
            panel = simd.fetch_add(counter)
        first = panel * _PANEL
        if first >= num_outputs:
            return
        outputs = min(_PANEL, num_outputs - first)
        for token in range(0, num_tokens, rows_at_once):
            rows = min(rows_at_once, num_tokens - token)
            source = x + x_stride * token
            whole = outputs // 4 * 4
            for column in range(0, whole, 4):
                weights = weight + weight_stride * (first + column)
                _dot_4(sums + 4 * column, source, x_stride, rows, weights, weight_stride, num_inputs, kind)
            for column in range(whole, outputs):
                weights = weight + weight_stride * (first + column)
                _dot_1(sums + 4 * column, source, x_stride, rows, weights, weight_stride, num_inputs, kind)
            for row in range(rows):
                target = out + size * ((token + row) * num_outputs + first)
                for at in range(0, outputs, LANES):
                    value = simd.load(sums + 4 * (row * _PANEL + at))
                    if bias != 0:
                        value = simd.add(value, load_numbers(bias + size * (first + at), kind, outputs - at))
                    store_numbers(target + size * at, value, kind, outputs - at)
        panel += 1


@helper
def prepare_rows(x: int, num_rows: int, depth: int, kind: int, scratch: int) -> tuple[int, int]:
    """Address and stride of contiguous rows as ``multiply`` reads them: as they are, or in float32 in ``scratch``."""
    if kind == FLOAT32 or (kind == BFLOAT16 and _BF16_PRODUCTS):
        return x, depth * size_of(kind)
    for row in range(num_rows):
        for at in range(0, depth, LANES):
            numbers = load_numbers(x + size_of(kind) * (row * depth + at), kind, depth - at)
            store_numbers(scratch + 4 * (row * depth + at), numbers, FLOAT32, depth - at)
    return scratch, 4 * depth


@helper
def _dot_4(
    sums: int, x: int, x_stride: int, rows: int, weights: int, weight_stride: int, depth: int, kind: int
) -> None:
    """Four columns of sums (rows, 64) = x (rows, depth) @ weights (4, depth)^T."""
    stride = 4 * _PANEL
    row = 0
    while row < rows:
        c = sums + stride * row
        a = x + x_stride * row
        left = rows - row
        step = 4 if left >= 4 else 2 if left >= 2 else 1
        if kind == FLOAT32:
            if step == 4:
                _float_4x4(c, stride, a, x_stride, weights, weight_stride, depth)
            elif step == 2:
                _float_2x4(c, stride, a, x_stride, weights, weight_stride, depth)
            else:
                _float_1x4(c, stride, a, x_stride, weights, weight_stride, depth)
        elif kind == BFLOAT16:
            if step == 4:
                _bf16_4x4(c, stride, a, x_stride, weights, weight_stride, depth)
            elif step == 2:
                _bf16_2x4(c, stride, a, x_stride, weights, weight_stride, depth)
            else:
                _bf16_1x4(c, stride, a, x_stride, weights, weight_stride, depth)
        else:
            if step == 4:
                _f16_4x4(c, stride, a, x_stride, weights, weight_stride, depth)
            elif step == 2:
                _f16_2x4(c, stride, a, x_stride, weights, weight_stride, depth)
            else:
                _f16_1x4(c, stride, a, x_stride, weights, weight_stride, depth)
        row += step


@helper
def _dot_1(
    sums: int, x: int, x_stride: int, rows: int, weights: int, weight_stride: int, depth: int, kind: int
) -> None:
    """One column of sums (rows, 64) = x (rows, depth) @ weights (1, depth)^T."""
    stride = 4 * _PANEL
    row = 0
    while row < rows:
        c = sums + stride * row
        a = x + x_stride * row
        left = rows - row
        step = 4 if left >= 4 else 2 if left >= 2 else 1
        if kind == FLOAT32:
            if step == 4:
                _float_4x1(c, stride, a, x_stride, weights, weight_stride, depth)
            elif step == 2:
                _float_2x1(c, stride, a, x_stride, weights, weight_stride, depth)
            else:
                _float_1x1(c, stride, a, x_stride, weights, weight_stride, depth)
        elif kind == BFLOAT16:
            if step == 4:
                _bf16_4x1(c, stride, a, x_stride, weights, weight_stride, depth)
            elif step == 2:
                _bf16_2x1(c, stride, a, x_stride, weights, weight_stride, depth)
            else:
                _bf16_1x1(c, stride, a, x_stride, weights, weight_stride, depth)
        else:
            if step == 4:
                _f16_4x1(c, stride, a, x_stride, weights, weight_stride, depth)
            elif step == 2:
                _f16_2x1(c, stride, a, x_stride, weights, weight_stride, depth)
            else:
                _f16_1x1(c, stride, a, x_stride, weights, weight_stride, depth)
        row += step
