"""Normalization, rotation with the cache's write, and SwiGLU on a GPU, each in one pass over memory.

Each computes in float32 and rounds once. The residual sum of ``add_rms_norm`` is rounded to its own type before it is normalized.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch, padded
from tightwire.kernels.cuda.numbers import narrowed, raw, widened
from tightwire.kernels.spec.layer_ops import check_rotation

_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_ROW_ELEMS = 1 << 16  # a row is held in the registers of one program
# Each of 128 threads rotates eight pairs: a vector of 16-bit numbers from either half of a head.
_ROTATED_PAIRS = 1024
_GATED_ELEMS = 1024  # a vector of eight 16-bit numbers for each of 128 threads


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute ``layer_ops.rms_norm_reference``; only the order of the float32 sum over D and the root's last bit differ."""
    _check_norm(x_TD, x_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=weight_D.dtype, device=x_TD.device)
    _normalize(x_TD, x_TD, weight_D, out_TD, out_TD, eps, adds=False)
    return out_TD


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``layer_ops.add_rms_norm_reference``: the normalized sum and the sum itself, both new tensors."""
    _check_norm(x_TD, residual_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=weight_D.dtype, device=x_TD.device)
    sum_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    _normalize(x_TD, residual_TD, weight_D, out_TD, sum_TD, eps, adds=True)
    return out_TD, sum_TD


def _check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if residual.shape != x.shape or weight.shape != x.shape[1:] or x.stride(1) != 1 or residual.stride(1) != 1:
        raise ValueError(
            "rms_norm needs x and residual (T, D) with contiguous rows and weight (D,); "
            f"got {tuple(x.shape)}, {tuple(residual.shape)} and {tuple(weight.shape)}"
        )
    if (
        weight.dtype not in _NUMBERS
        or x.dtype not in (torch.float32, weight.dtype)
        or residual.dtype != x.dtype
        or weight.stride(0) != 1
    ):
        raise ValueError(
            f"rms_norm needs weight in one of {', '.join(map(str, _NUMBERS))}, x and residual in that dtype or in "
            f"torch.float32; got {weight.dtype}, {x.dtype} and {residual.dtype}"
        )
    if x.shape[1] > _MAX_ROW_ELEMS:
        raise ValueError(f"rms_norm takes rows of at most {_MAX_ROW_ELEMS} numbers, got {x.shape[1]}")


def _normalize(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, adds: bool
) -> None:
    num_rows, size = x.shape
    if num_rows:
        given = x, residual, weight, out, total, x.stride(0), residual.stride(0), size, eps
        launch(_rms_norm_row, num_rows, x.device, *given, adds, triton.next_power_of_2(size))


@triton.jit(do_not_specialize=["eps"])
def _rms_norm_row(
    x, residual, weight, out, total, x_stride, residual_stride, size, eps, ADDS: tl.constexpr, PLACES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    kept = place < size
    value = widened(tl.load(raw(x) + row * x_stride + place, mask=kept, other=0))
    if ADDS:
        value += widened(tl.load(raw(residual) + row * residual_stride + place, mask=kept, other=0))
        stored = narrowed(value, total.dtype.element_ty)
        tl.store(raw(total) + row * size + place, stored, mask=kept)
        value = widened(stored)
    mean = tl.sum(value * value, 0) / size
    factor = widened(tl.load(raw(weight) + place, mask=kept, other=0))
    normed = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * factor
    tl.store(raw(out) + row * size + place, narrowed(normed, out.dtype.element_ty), mask=kept)


def rotate_and_cache(
    qkv_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> Tensor:
    """Compute ``layer_ops.rotate_and_cache`` for CUDA tensors. The returned queries are contiguous."""
    check_rotation(qkv_THE, cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T)
    num_tokens, num_all_heads, head_dim = qkv_THE.shape
    _, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    num_heads = num_all_heads - 2 * num_kv_heads
    q_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_THE.dtype, device=qkv_THE.device)
    pairs = padded(head_dim // 2)
    heads_at_once = min(padded(num_all_heads), max(1, _ROTATED_PAIRS // pairs))
    if num_tokens:
        tensors = qkv_THE, cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T, q_THE
        strides = *qkv_THE.stride()[:2], cos_TE.stride(0), sin_TE.stride(0), k_cache_NKPE.stride(0)
        sizes = num_heads, num_kv_heads, head_dim // 2, tokens_per_block, heads_at_once, pairs
        num_programs = num_tokens * -(-num_all_heads // heads_at_once)
        launch(_rotate_and_cache_heads, num_programs, qkv_THE.device, *tensors, *strides, *sizes)
    return q_THE


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
    cos_HE = tl.load(cos + token * cos_stride + pair_E, mask=pair_E < HALF, other=0)[None, :]
    sin_HE = tl.load(sin + token * sin_stride + pair_E, mask=pair_E < HALF, other=0)[None, :]

    turned_first_HE = first_HE * cos_HE - second_HE * sin_HE
    turned_second_HE = second_HE * cos_HE + first_HE * sin_HE
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


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """Compute ``layer_ops.swiglu_reference``; silu loses some digits for large negative gates, where it is nearly 0."""
    num_tokens, columns = gate_up_T2F.shape
    if columns % 2 or gate_up_T2F.dtype not in _NUMBERS or gate_up_T2F.stride(1) != 1:
        raise ValueError(
            f"swiglu needs (T, 2F) with contiguous rows in one of {', '.join(map(str, _NUMBERS))}; "
            f"got {tuple(gate_up_T2F.shape)} {gate_up_T2F.dtype} with strides {gate_up_T2F.stride()}"
        )
    width = columns // 2
    out_TF = torch.empty((num_tokens, width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    parts = -(-width // _GATED_ELEMS)
    if out_TF.numel():
        given = gate_up_T2F, out_TF, gate_up_T2F.stride(0), width, parts, _GATED_ELEMS
        launch(_swiglu_part, num_tokens * parts, out_TF.device, *given)
    return out_TF


@triton.jit
def _swiglu_part(gate_up, out, row_stride, width, parts, PLACES: tl.constexpr):
    row = (tl.program_id(0) // parts).to(tl.int64)
    place = tl.program_id(0) % parts * PLACES + tl.arange(0, PLACES)
    kept = place < width
    gates = raw(gate_up) + row * row_stride
    dtype: tl.constexpr = out.dtype.element_ty
    gate = widened(tl.load(gates + place, mask=kept, other=0))
    up = widened(tl.load(gates + width + place, mask=kept, other=0))
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    tl.store(raw(out) + row * width + place, narrowed(silu * up, dtype), mask=kept)
