"""Rotates queries and keys and writes the KV cache on a GPU, in one pass over memory."""

# Type checkers cannot follow a kernel's body: constants have the attributes of the objects they stand for.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch, padded
from tightwire.kernels.cuda.numbers import narrowed, raw, widened

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAM_PAIRS = 1024  # each of 128 threads rotates eight pairs: a vector of 16-bit numbers from either half of a head


def rotate_and_cache(
    qkv_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> Tensor:
    """Compute ``qkv.rotate_and_cache`` for CUDA tensors. The returned queries are contiguous."""
    _check(qkv_THE, cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T)
    num_tokens, num_all_heads, head_dim = qkv_THE.shape
    _, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    q_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_THE.dtype, device=qkv_THE.device)
    pairs = padded(head_dim // 2)
    heads_at_once = min(padded(num_all_heads), max(1, _PROGRAM_PAIRS // pairs))
    if num_tokens:
        launch(
            _rotate_and_cache_heads,
            num_tokens * -(-num_all_heads // heads_at_once),
            qkv_THE.device,
            qkv_THE,
            cos_TE,
            sin_TE,
            k_cache_NKPE,
            v_cache_NKPE,
            slot_T,
            q_THE,
            *qkv_THE.stride()[:2],
            cos_TE.stride(0),
            sin_TE.stride(0),
            k_cache_NKPE.stride(0),
            num_heads,
            num_kv_heads,
            head_dim // 2,
            tokens_per_block,
            heads_at_once,
            pairs,
        )
    return q_THE


def _check(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    num_tokens, num_all_heads, head_dim = qkv.shape
    _, num_kv_heads, tokens_per_block, cache_dim = k_cache.shape
    strides = k_cache.stride()
    if head_dim % 2 or cache_dim != head_dim or num_all_heads <= 2 * num_kv_heads or v_cache.shape != k_cache.shape:
        raise ValueError(
            "rotate_and_cache needs qkv (T, H + 2 K, E) with E even, and caches (N, K, P, E); "
            f"got {tuple(qkv.shape)}, {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if cos.shape != (num_tokens, head_dim // 2) or sin.shape != cos.shape or slots.shape != (num_tokens,):
        raise ValueError(
            f"for {num_tokens} rows of heads of {head_dim} rotate_and_cache needs cos and sin "
            f"({num_tokens}, {head_dim // 2}) and slots ({num_tokens},); "
            f"got {tuple(cos.shape)}, {tuple(sin.shape)} and {tuple(slots.shape)}"
        )
    if (
        qkv.dtype not in _NUMBERS
        or k_cache.dtype != qkv.dtype
        or v_cache.dtype != qkv.dtype
        or (cos.dtype, sin.dtype, slots.dtype) != (torch.float32, torch.float32, torch.int32)
    ):
        raise ValueError(
            f"rotate_and_cache needs qkv and caches in one of {', '.join(map(str, _NUMBERS))}, cos and sin in float32 "
            f"and int32 slots; got {qkv.dtype}, {k_cache.dtype}, {v_cache.dtype}, {cos.dtype}, {sin.dtype} "
            f"and {slots.dtype}"
        )
    if (
        (qkv.stride(2), cos.stride(1), sin.stride(1), slots.stride(0)) != (1, 1, 1, 1)
        or strides[1:] != (tokens_per_block * head_dim, head_dim, 1)
        or v_cache.stride() != strides
    ):
        raise ValueError(
            "rotate_and_cache needs caches of the same layout, and contiguous heads, angles, cache blocks and slots"
        )


@triton.jit
def _rotate_and_cache_heads(
    qkv,
    cos,
    sin,
    k_cache,
    v_cache,
    slots,
    q_out,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rotate the queries and keys among HEADS of one token's heads, and store each head."""
    PARTS: tl.constexpr = (NUM_HEADS + 2 * KV_HEADS + HEADS - 1) // HEADS
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    head_H = tl.program_id(0) % PARTS * HEADS + tl.arange(0, HEADS)
    pair_E = tl.arange(0, PAIRS)
    there_HE = (head_H < NUM_HEADS + 2 * KV_HEADS)[:, None] & (pair_E < HALF)[None, :]
    source_HE = raw(qkv) + token * token_stride + head_H[:, None] * head_stride + pair_E[None, :]
    first_HE = widened(tl.load(source_HE, mask=there_HE, other=0))
    second_HE = widened(tl.load(source_HE + HALF, mask=there_HE, other=0))
    cos_E = tl.load(cos + token * cos_stride + pair_E, mask=pair_E < HALF, other=0)
    sin_E = tl.load(sin + token * sin_stride + pair_E, mask=pair_E < HALF, other=0)
    cos_HE = widened(narrowed(cos_E, dtype))[None, :]
    sin_HE = widened(narrowed(sin_E, dtype))[None, :]

    turned_first_HE = _rounded(first_HE * cos_HE, dtype) - _rounded(second_HE * sin_HE, dtype)
    turned_second_HE = _rounded(second_HE * cos_HE, dtype) + _rounded(first_HE * sin_HE, dtype)
    turns_H1 = (head_H < NUM_HEADS + KV_HEADS)[:, None]
    first_HE = narrowed(tl.where(turns_H1, turned_first_HE, first_HE), dtype)
    second_HE = narrowed(tl.where(turns_H1, turned_second_HE, second_HE), dtype)

    is_q_HE = there_HE & (head_H < NUM_HEADS)[:, None]
    q_HE = raw(q_out) + ((token * NUM_HEADS + head_H) * 2 * HALF)[:, None] + pair_E[None, :]
    tl.store(q_HE, first_HE, mask=is_q_HE)
    tl.store(q_HE + HALF, second_HE, mask=is_q_HE)

    slot = tl.load(slots + token)
    kv_head_H = (head_H - NUM_HEADS) % KV_HEADS
    place_H = (slot // PAGE).to(tl.int64) * block_stride + (kv_head_H * PAGE + slot % PAGE) * 2 * HALF
    place_HE = place_H[:, None] + pair_E[None, :]
    cached_HE = there_HE & (head_H >= NUM_HEADS)[:, None] & (slot >= 0)
    is_k_HE = cached_HE & turns_H1
    tl.store(raw(k_cache) + place_HE, first_HE, mask=is_k_HE)
    tl.store(raw(k_cache) + place_HE + HALF, second_HE, mask=is_k_HE)
    is_v_HE = cached_HE & (head_H >= NUM_HEADS + KV_HEADS)[:, None]
    tl.store(raw(v_cache) + place_HE, first_HE, mask=is_v_HE)
    tl.store(raw(v_cache) + place_HE + HALF, second_HE, mask=is_v_HE)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return widened(narrowed(x, dtype))
