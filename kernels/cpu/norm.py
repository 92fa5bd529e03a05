"""Root-mean-square normalization on CPU: one pass per row.

It replaces six torch operations, each of which costs a microsecond before it computes anything.
"""

import math

import torch
from torch import Tensor

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import kernel
from tightwire.kernels.cpu.vector.numbers import load_numbers, rounded, size_of, store_rounded
from tightwire.kernels.cpu.vector.simd import LANES, NUMBER_KIND
from tightwire.kernels.cpu.vector.threads import run_on_rows


def rms_norm_cpu(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``norm.rms_norm`` for CPU tensors."""
    _check(x_TD, x_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    _run(out_TD, None, x_TD, None, weight_D, eps)
    return out_TD


def add_rms_norm_cpu(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``norm.add_rms_norm`` for CPU tensors."""
    _check(x_TD, residual_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    sum_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    _run(out_TD, sum_TD, x_TD, residual_TD, weight_D, eps)
    return out_TD, sum_TD


def _check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if residual.shape != x.shape or weight.shape[0] != x.shape[1] or x.stride(1) != 1 or residual.stride(1) != 1:
        raise ValueError(
            "rms_norm needs x and residual (T, D) with contiguous rows and weight (D,); "
            f"got {tuple(x.shape)}, {tuple(residual.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype not in NUMBER_KIND or weight.dtype != x.dtype or residual.dtype != x.dtype or weight.stride(0) != 1:
        raise ValueError(
            f"rms_norm needs x, residual and weight in one of {', '.join(map(str, NUMBER_KIND))}; "
            f"got {x.dtype}, {residual.dtype} and {weight.dtype}"
        )


def _run(out: Tensor, total: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
    num_tokens, size = x.shape
    kind, number_bytes = NUMBER_KIND[x.dtype], x.element_size()
    arguments = (
        out.data_ptr(),
        total.data_ptr() if total is not None else 0,
        x.data_ptr(),
        x.stride(0) * number_bytes,
        residual.data_ptr() if residual is not None else 0,
        residual.stride(0) * number_bytes if residual is not None else 0,
        weight.data_ptr(),
        eps,
        size,
        kind,
    )
    run_on_rows(rms_norm_rows, arguments, num_tokens, size)


@kernel
def rms_norm_rows(
    out: int,
    total: int,
    x: int,
    x_stride: int,
    residual: int,
    residual_stride: int,
    weight: int,
    eps: float,
    size: int,
    kind: int,
    start: int,
    stop: int,
) -> None:
    """Rows ``start`` to ``stop``; with ``total`` 0 there is no residual. ``out`` and ``total`` are contiguous."""
    number_bytes = size_of(kind)
    for row in range(start, stop):
        source = x + row * x_stride
        if total != 0:
            target = total + row * size * number_bytes
            added = residual + row * residual_stride
            for at in range(0, size, LANES):
                a = load_numbers(source + number_bytes * at, kind, size - at)
                b = load_numbers(added + number_bytes * at, kind, size - at)
                store_rounded(target + number_bytes * at, simd.add(a, b), kind, size - at)
            source = target
        squares = simd.splat(0.0)
        for at in range(0, size, LANES):
            value = load_numbers(source + number_bytes * at, kind, size - at)
            squares = simd.fma(value, value, squares)
        scale = simd.splat(1.0 / math.sqrt(simd.sum_lanes(squares) / size + eps))
        for at in range(0, size, LANES):
            value = load_numbers(source + number_bytes * at, kind, size - at)
            normed = rounded(simd.mul(value, scale), kind)
            factor = load_numbers(weight + number_bytes * at, kind, size - at)
            store_rounded(out + number_bytes * (row * size + at), simd.mul(normed, factor), kind, size - at)
