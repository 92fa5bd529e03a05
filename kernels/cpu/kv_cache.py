"""Writing keys and values into the paged cache on CPU: one numba call for both, three microseconds for one token."""

import torch
from torch import Tensor

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import kernel


def write_kv_cpu(k_TKE: Tensor, v_TKE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor) -> None:
    """``attention.write_kv`` for CPU tensors; see there."""
    num_tokens, num_kv_heads, head_dim = shape = k_TKE.shape
    num_blocks, cache_heads, tokens_per_block, cache_dim = k_cache_NKPE.shape
    strides, dtype = k_cache_NKPE.stride(), k_cache_NKPE.dtype
    if v_TKE.shape != shape or (num_kv_heads, head_dim) != (cache_heads, cache_dim) or len(slot_T) != num_tokens:
        raise ValueError(
            "write_kv needs k and v (T, K, E), caches (N, K, P, E) and slots (T,); "
            f"got {tuple(shape)}, {tuple(v_TKE.shape)}, {tuple(k_cache_NKPE.shape)} and {tuple(slot_T.shape)}"
        )
    if k_TKE.dtype != dtype or v_TKE.dtype != dtype or v_cache_NKPE.dtype != dtype or slot_T.dtype != torch.int32:
        raise ValueError(
            "write_kv needs k, v and caches in one dtype and int32 slots; "
            f"got {k_TKE.dtype}, {v_TKE.dtype}, {dtype}, {v_cache_NKPE.dtype} and {slot_T.dtype}"
        )
    if (
        v_cache_NKPE.shape != k_cache_NKPE.shape
        or v_cache_NKPE.stride() != strides
        or strides[1:] != (tokens_per_block * head_dim, head_dim, 1)
        or k_TKE.stride(2) != 1
        or v_TKE.stride(2) != 1
        or slot_T.stride(0) != 1
    ):
        raise ValueError("write_kv needs caches alike, and contiguous heads, cache blocks and slots")
    number_bytes = k_cache_NKPE.element_size()
    wrong = write_slots(
        k_TKE.data_ptr(),
        k_TKE.stride(0) * number_bytes,
        k_TKE.stride(1) * number_bytes,
        v_TKE.data_ptr(),
        v_TKE.stride(0) * number_bytes,
        v_TKE.stride(1) * number_bytes,
        k_cache_NKPE.data_ptr(),
        v_cache_NKPE.data_ptr(),
        strides[0] * number_bytes,
        slot_T.data_ptr(),
        num_tokens,
        num_blocks,
        num_kv_heads,
        tokens_per_block,
        head_dim * number_bytes,
    )
    if wrong >= 0:
        raise ValueError(
            f"token {wrong} has slot {int(slot_T[wrong])}; the cache has slots 0 to {num_blocks * tokens_per_block - 1}"
        )


@kernel
def write_slots(
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    v: int,
    v_token_stride: int,
    v_head_stride: int,
    k_cache: int,
    v_cache: int,
    cache_block_stride: int,
    slots: int,
    num_tokens: int,
    num_blocks: int,
    num_kv_heads: int,
    tokens_per_block: int,
    head_bytes: int,
) -> int:
    """Copy each token's heads to its slot; returns minus one, or the first token whose slot is not in the cache."""
    for token in range(num_tokens):
        slot = simd.load_i32(slots + 4 * token)
        if slot < 0 or slot >= num_blocks * tokens_per_block:
            return token
        block = slot // tokens_per_block
        target = block * cache_block_stride + (slot - block * tokens_per_block) * head_bytes
        for head in range(num_kv_heads):
            place = target + head * tokens_per_block * head_bytes
            simd.copy_bytes(k_cache + place, k + token * k_token_stride + head * k_head_stride, head_bytes)
            simd.copy_bytes(v_cache + place, v + token * v_token_stride + head * v_head_stride, head_bytes)
    return -1
