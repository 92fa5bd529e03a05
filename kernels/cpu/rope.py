"""Rotary position embedding on CPU."""

import torch
from torch import Tensor

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import kernel
from tightwire.kernels.cpu.vector.numbers import load_numbers, rounded, size_of, store_rounded
from tightwire.kernels.cpu.vector.simd import LANES, NUMBER_KIND
from tightwire.kernels.cpu.vector.threads import run_on_rows


def apply_rope_cpu(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """``qkv.apply_rope`` for CPU tensors."""
    num_tokens, num_heads, head_dim = x_THE.shape
    _check(x_THE, cos_TE, sin_TE)
    out_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=x_THE.dtype)
    number_bytes = x_THE.element_size()
    arguments = (
        out_THE.data_ptr(),
        x_THE.data_ptr(),
        x_THE.stride(0) * number_bytes,
        x_THE.stride(1) * number_bytes,
        cos_TE.data_ptr(),
        cos_TE.stride(0) * 4,
        sin_TE.data_ptr(),
        sin_TE.stride(0) * 4,
        num_heads,
        head_dim // 2,
        NUMBER_KIND[x_THE.dtype],
    )
    run_on_rows(rope_rows, arguments, num_tokens, num_heads * head_dim)
    return out_THE


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    num_tokens, _, head_dim = x.shape
    if head_dim % 2 or cos.shape != (num_tokens, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            "rope needs x (T, H, E) with E even, cos and sin (T, E/2); "
            f"got {tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if x.dtype not in NUMBER_KIND or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(
            f"rope needs x in one of {', '.join(map(str, NUMBER_KIND))}, cos and sin in float32; "
            f"got {x.dtype}, {cos.dtype} and {sin.dtype}"
        )
    if x.stride(2) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError("rope needs the last dimension of x, cos and sin contiguous")


@kernel
def rope_rows(
    out: int,
    x: int,
    token_stride: int,
    head_stride: int,
    cos: int,
    cos_stride: int,
    sin: int,
    sin_stride: int,
    num_heads: int,
    half: int,
    kind: int,
    start: int,
    stop: int,
) -> None:
    """Tokens ``start`` to ``stop``; strides are bytes, ``out`` is contiguous."""
    number_bytes = size_of(kind)
    for token in range(start, stop):
        for at in range(0, half, LANES):
            count = half - at
            cos_part = rounded(load_numbers(cos + token * cos_stride + 4 * at, simd.FLOAT32, count), kind)
            sin_part = rounded(load_numbers(sin + token * sin_stride + 4 * at, simd.FLOAT32, count), kind)
            for head in range(num_heads):
                source = x + token * token_stride + head * head_stride + number_bytes * at
                target = out + number_bytes * ((token * num_heads + head) * 2 * half + at)
                first = load_numbers(source, kind, count)
                second = load_numbers(source + number_bytes * half, kind, count)
                turned = simd.sub(rounded(simd.mul(first, cos_part), kind), rounded(simd.mul(second, sin_part), kind))
                store_rounded(target, turned, kind, count)
                turned = simd.add(rounded(simd.mul(second, cos_part), kind), rounded(simd.mul(first, sin_part), kind))
                store_rounded(target + number_bytes * half, turned, kind, count)
