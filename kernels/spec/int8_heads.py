"""Heads of keys and values in 8 bits, as a KV cache with ``--kv-cache-dtype int8`` holds them.

A head's part of a cache block, a tensor (P, E + 2) int8, is P E codes, one row a token, and then P bfloat16 scales:

    scale = max |x| / 127, rounded up to bfloat16;  code = x / scale, rounded to nearest even;  decoded: code * scale

A channel that is large in all tokens would set the step of all others, so biases of keys are not cached (``KeyBias``).
"""

import torch
from torch import Tensor

SCALE_BYTES = 2  # of each head and token
TOP = 127.0
_MIN_SCALE = 2.0**-126  # the least whose inverse is finite
_NAN_BITS = 0x7FC0


def head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one head of one token in a cache of ``dtype``."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim * dtype.itemsize


def cache_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the last size of a cache (N, K, P, ...) of ``dtype``."""
    return head_bytes(head_dim, dtype) // dtype.itemsize


def quantize_heads_reference(x_TKE: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (T, K, E) int8 and scales (T, K) bfloat16; a head with an infinity or NaN has scale NaN and codes 0."""
    x_TKE = x_TKE.float().contiguous()
    largest_TK = (x_TKE.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    finite_TK = largest_TK < 0x7F800000
    least_TK = (largest_TK.view(torch.float32) / TOP).clamp(min=_MIN_SCALE)
    bits_TK = torch.where(finite_TK, (least_TK.view(torch.int32) + 0xFFFF) >> 16, _NAN_BITS)
    inverse_TK1 = (1.0 / (bits_TK << 16).view(torch.float32)).unsqueeze(-1)
    codes_TKE = torch.where(finite_TK.unsqueeze(-1), x_TKE * inverse_TK1, 0.0).round()
    return codes_TKE.to(torch.int8), bits_TK.to(torch.int16).view(torch.bfloat16)


def parts_of(cache_NKPX: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of an int8 cache's codes (N, K, P, E) and scales (N, K, P) bfloat16."""
    num_blocks, num_heads, page, width = cache_NKPX.shape
    head_dim, strides, start = width - SCALE_BYTES, cache_NKPX.stride()[:2], cache_NKPX.storage_offset()
    codes = cache_NKPX.as_strided((num_blocks, num_heads, page, head_dim), (*strides, head_dim, 1), start)
    scales = cache_NKPX.as_strided((num_blocks, num_heads, 2 * page), (*strides, 1), start + page * head_dim)
    return codes, scales.view(torch.bfloat16)


def max_error(x_TKE: Tensor) -> Tensor:
    """Return (T, K, 1): the most by which a decoded number differs, half a step of a scale rounded up by up to 2^-7."""
    largest_TK1 = x_TKE.float().abs().amax(-1, keepdim=True).clamp(min=TOP * _MIN_SCALE)
    return largest_TK1 / TOP * (0.5 * (1 + 2**-7) + 2**-15)
