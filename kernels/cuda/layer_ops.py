"""Normalization, rotation with the cache's write, and SwiGLU on a GPU, each in one pass over memory.

Each computes in float32 and rounds once. The residual sum of ``add_rms_norm`` is rounded to its own type before it is normalized.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch, padded, wait_for_last
from tightwire.kernels.cuda.numbers import bf16_above, from_bf16, narrowed, raw, widened
from tightwire.kernels.spec.layer_ops import HeadNorms, Rotation, SumNorms, head_norm

_MAX_ROW_ELEMS = 1 << 16  # a row is held in the registers of one program
# Each of 128 threads rotates eight pairs: a vector of 16-bit numbers from either half of a head.
_ROTATED_PAIRS = 1024
_GELU_FIRST = tl.constexpr(-1.5957691216057308)  # -2 sqrt(2 / pi)
_GELU_THIRD = tl.constexpr(-0.07135481627260025)  # that times 0.044715
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_GATED_ELEMS = 1024  # a vector of eight 16-bit numbers for each of 128 threads


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor | None, norms: SumNorms) -> tuple[Tensor, Tensor]:
    """Compute ``add_rms_norm_reference``, both new tensors. The order of the float32 sum over D and the root's last bit differ."""
    weight_D, form, x_weight_D, dtype = norms
    num_rows, size = x_TD.shape
    if size > _MAX_ROW_ELEMS:
        raise ValueError(f"rms_norm takes rows of at most {_MAX_ROW_ELEMS} numbers, got {size}")
    out_TD = torch.empty(x_TD.shape, dtype=dtype if weight_D is None else weight_D.dtype, device=x_TD.device)
    sum_TD = out_TD if residual_TD is None else torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if num_rows:
        strides, places = (x_TD.stride(0), 0 if residual_TD is None else residual_TD.stride(0)), padded(size)
        given = x_TD, residual_TD, weight_D, x_weight_D, out_TD, sum_TD, strides, size, tuple(form), places
        launch(_rms_norm_row, num_rows, x_TD.device, *given, num_warps=min(16, max(4, places // 512)))
    return out_TD, sum_TD


@triton.jit
def _rms_norm_row(x, residual, weight, x_weight, out, total, strides, size, form, PLACES: tl.constexpr):
    wait_for_last()
    x_stride, residual_stride = strides
    eps, offset, scale = form
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    kept = place < size
    value = widened(tl.load(raw(x) + row * x_stride + place, mask=kept, other=0))
    if weight is not None:  # before the sum, which all threads wait for
        factor = widened(tl.load(raw(weight) + place, mask=kept, other=0)) + offset
    if x_weight is not None:
        root = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, 0) / size + eps))
        value = value * root * (widened(tl.load(raw(x_weight) + place, mask=kept, other=0)) + offset)
    if residual is not None:
        value = value * scale + widened(tl.load(raw(residual) + row * residual_stride + place, mask=kept, other=0))
        stored = narrowed(value, total.dtype.element_ty)
        tl.store(raw(total) + row * size + place, stored, mask=kept)
        value = widened(stored)
    if weight is not None:
        root = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(value * value, 0) / size + eps))
        value = value * root * factor
    tl.store(raw(out) + row * size + place, narrowed(value, out.dtype.element_ty), mask=kept)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of queries, keys and values, and the layout of their caches, as constants of a kernel."""

    queries: int
    keys: int
    half: int  # pairs of numbers of a head
    turned: int  # the first of them, which are rotated
    page: int  # tokens of a block
    stored: int  # numbers of a token's key in a cache
    block_stride: int

    @classmethod
    def of(cls, num_all_heads: int, head_dim: int, rotation: Rotation) -> Self:
        keys, (_, num_keys, page, stored) = rotation.k_cache_NKPE, rotation.k_cache_NKPE.shape
        half, turned = head_dim // 2, rotation.cos_TE.shape[1]
        return cls(num_all_heads - 2 * num_keys, num_keys, half, turned, page, stored, keys.stride(0))


def rotate_and_cache(qkv_THE: Tensor, rotation: Rotation, norms: HeadNorms | None = None) -> Tensor:
    """Compute ``layer_ops.rotate_and_cache`` for CUDA tensors. The returned queries are contiguous.

    Norms of all heads together are applied in a pass before; those of each head while it is rotated.
    """
    num_tokens, num_all_heads, head_dim = qkv_THE.shape
    heads = Heads.of(num_all_heads, head_dim, rotation)
    if norms is not None and norms.whole:
        q, k, given_THE = slice(heads.queries), slice(heads.queries, heads.queries + heads.keys), qkv_THE
        qkv_THE = given_THE.clone()
        qkv_THE[:, q] = head_norm(given_THE[:, q], norms.q_norm, norms, 0)
        qkv_THE[:, k] = head_norm(given_THE[:, k], norms.k_norm, norms, 1)
        norms = None
    q_THE = torch.empty((num_tokens, heads.queries, head_dim), dtype=qkv_THE.dtype, device=qkv_THE.device)
    pairs = padded(heads.half)
    at_once = min(padded(num_all_heads), max(1, _ROTATED_PAIRS // pairs))
    if num_tokens:
        own_norms = None if norms is None else (norms.q_norm, norms.k_norm, norms.form.eps, norms.form.offset)
        strides = *qkv_THE.stride()[:2], rotation.cos_TE.stride(0), rotation.sin_TE.stride(0)
        given = qkv_THE, tuple(rotation), q_THE, own_norms, strides, heads, at_once, pairs
        launch(_rotate_and_cache_heads, num_tokens * -(-num_all_heads // at_once), q_THE.device, *given)
    return q_THE


@triton.jit
def _rotate_and_cache_heads(
    qkv, rotation, q_out, norms, strides, heads: tl.constexpr, AT_ONCE: tl.constexpr, PAIRS: tl.constexpr
):
    """Normalize and rotate the queries and keys among AT_ONCE of one token's heads, and store each head."""
    wait_for_last()
    cos, sin, k_cache, v_cache, slots = rotation
    token_stride, head_stride, cos_stride, sin_stride = strides
    NUM_HEADS: tl.constexpr = heads.queries
    KV_HEADS: tl.constexpr = heads.keys
    HALF: tl.constexpr = heads.half
    PAGE: tl.constexpr = heads.page
    PARTS: tl.constexpr = (NUM_HEADS + 2 * KV_HEADS + AT_ONCE - 1) // AT_ONCE
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    head_H = tl.program_id(0) % PARTS * AT_ONCE + tl.arange(0, AT_ONCE)
    pair_E = tl.arange(0, PAIRS)
    first_E, second_E = pair_places(pair_E, heads)
    there_HE = (head_H < NUM_HEADS + 2 * KV_HEADS)[:, None] & (pair_E < HALF)[None, :]
    source_H = raw(qkv) + token * token_stride + head_H * head_stride
    first_HE = widened(tl.load(source_H[:, None] + first_E[None, :], mask=there_HE, other=0))
    second_HE = widened(tl.load(source_H[:, None] + second_E[None, :], mask=there_HE, other=0))
    turns_H1 = (head_H < NUM_HEADS + KV_HEADS)[:, None]
    if norms is not None:
        q_norm, k_norm, eps, offset = norms
        squares_H = tl.sum(first_HE * first_HE + second_HE * second_HE, 1)
        root_H1 = tl.div_rn(1.0, tl.sqrt_rn(squares_H / (2 * HALF) + eps))[:, None]
        is_q_H1 = (head_H < NUM_HEADS)[:, None]
        inside_E = pair_E < HALF
        first_q_E = widened(tl.load(raw(q_norm) + first_E, mask=inside_E, other=0))[None, :]
        first_k_E = widened(tl.load(raw(k_norm) + first_E, mask=inside_E, other=0))[None, :]
        second_q_E = widened(tl.load(raw(q_norm) + second_E, mask=inside_E, other=0))[None, :]
        second_k_E = widened(tl.load(raw(k_norm) + second_E, mask=inside_E, other=0))[None, :]
        first_normed_HE = first_HE * root_H1 * (tl.where(is_q_H1, first_q_E, first_k_E) + offset)
        second_normed_HE = second_HE * root_H1 * (tl.where(is_q_H1, second_q_E, second_k_E) + offset)
        first_HE = tl.where(turns_H1, widened(narrowed(first_normed_HE, dtype)), first_HE)
        second_HE = tl.where(turns_H1, widened(narrowed(second_normed_HE, dtype)), second_HE)
    cos_HE = tl.load(cos + token * cos_stride + pair_E, mask=pair_E < heads.turned, other=1)[None, :]
    sin_HE = tl.load(sin + token * sin_stride + pair_E, mask=pair_E < heads.turned, other=0)[None, :]

    turned_first_HE = first_HE * cos_HE - second_HE * sin_HE
    turned_second_HE = second_HE * cos_HE + first_HE * sin_HE
    first_HE = narrowed(tl.where(turns_H1, turned_first_HE, first_HE), dtype)
    second_HE = narrowed(tl.where(turns_H1, turned_second_HE, second_HE), dtype)

    is_q_HE = there_HE & (head_H < NUM_HEADS)[:, None]
    q_H = raw(q_out) + (token * NUM_HEADS + head_H) * 2 * HALF
    tl.store(q_H[:, None] + first_E[None, :], first_HE, mask=is_q_HE)
    tl.store(q_H[:, None] + second_E[None, :], second_HE, mask=is_q_HE)

    slot = tl.load(slots + token)
    kv_head_H = (head_H - NUM_HEADS) % KV_HEADS
    base_H = (slot // PAGE).to(tl.int64) * heads.block_stride + kv_head_H * (PAGE * heads.stored)
    place_H = base_H + slot % PAGE * (2 * HALF)
    first_place_HE = place_H[:, None] + first_E[None, :]
    second_place_HE = place_H[:, None] + second_E[None, :]
    cached_HE = there_HE & (head_H >= NUM_HEADS)[:, None] & (slot >= 0)
    is_k_HE = cached_HE & turns_H1
    is_v_HE = cached_HE & (head_H >= NUM_HEADS + KV_HEADS)[:, None]
    stored_dtype: tl.constexpr = k_cache.dtype.element_ty
    if stored_dtype == tl.int8:
        first_HE, second_HE, scale_H = _quantized(widened(first_HE), widened(second_HE))
        scale_place_H = base_H + (PAGE * 2 * HALF + slot % PAGE * 2)
        is_v_H = (head_H >= NUM_HEADS + KV_HEADS) & (head_H < NUM_HEADS + 2 * KV_HEADS) & (slot >= 0)
        is_k_H = (head_H >= NUM_HEADS) & (head_H < NUM_HEADS + KV_HEADS) & (slot >= 0)
        tl.store((k_cache + scale_place_H).to(tl.pointer_type(tl.int16), bitcast=True), scale_H, mask=is_k_H)
        tl.store((v_cache + scale_place_H).to(tl.pointer_type(tl.int16), bitcast=True), scale_H, mask=is_v_H)
    elif stored_dtype != dtype:
        first_HE = narrowed(widened(first_HE), stored_dtype)
        second_HE = narrowed(widened(second_HE), stored_dtype)
    tl.store(raw(k_cache) + first_place_HE, first_HE, mask=is_k_HE)
    tl.store(raw(k_cache) + second_place_HE, second_HE, mask=is_k_HE)
    tl.store(raw(v_cache) + first_place_HE, first_HE, mask=is_v_HE)
    tl.store(raw(v_cache) + second_place_HE, second_HE, mask=is_v_HE)


@triton.jit
def pair_places(pair, heads: tl.constexpr):
    """Return a pair's two places in a head: as far apart as many pairs are rotated; of those that are not, by half a head."""
    if heads.turned == heads.half:  # places that follow each other load in vectors
        return pair, pair + heads.half
    else:
        turned = pair < heads.turned
        return tl.where(turned, pair, pair + heads.turned), pair + tl.where(turned, heads.turned, heads.half)


@triton.jit
def _quantized(first_HE, second_HE):
    """Return codes of both halves of heads, and (H,) int16 bits of their scales, as ``spec.int8_heads`` defines them."""
    first_bits_HE = first_HE.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    second_bits_HE = second_HE.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_H = tl.max(tl.maximum(first_bits_HE, second_bits_HE), 1)
    finite_H = largest_H < 0x7F800000
    size_H = tl.where(finite_H, largest_H, 0).to(tl.float32, bitcast=True)
    least_H = tl.div_rn(size_H, tl.full(size_H.shape, 127.0, tl.float32))
    bits_H = bf16_above(tl.maximum(least_H, 2.0**-126))
    inverse_H = tl.div_rn(tl.full(largest_H.shape, 1.0, tl.float32), from_bf16(bits_H))
    kept_H1 = tl.where(finite_H, 0xFF, 0)[:, None]
    first_HE = (first_HE * inverse_H[:, None] + _TO_WHOLE).to(tl.int32, bitcast=True) & kept_H1
    second_HE = (second_HE * inverse_H[:, None] + _TO_WHOLE).to(tl.int32, bitcast=True) & kept_H1
    return first_HE.to(tl.int8), second_HE.to(tl.int8), tl.where(finite_H, bits_H, 0x7FC0).to(tl.int16)


def swiglu(gate_up_T2F: Tensor, *, gelu: bool = False) -> Tensor:
    """Compute ``layer_ops.swiglu_reference``; silu loses some digits for large negative gates, where it is nearly 0."""
    num_tokens, columns = gate_up_T2F.shape
    width = columns // 2
    out_TF = torch.empty((num_tokens, width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    parts = -(-width // _GATED_ELEMS)
    if out_TF.numel():
        given = gate_up_T2F, out_TF, gate_up_T2F.stride(0), width, parts, _GATED_ELEMS, gelu
        launch(_swiglu_part, num_tokens * parts, out_TF.device, *given)
    return out_TF


@triton.jit
def _swiglu_part(gate_up, out, row_stride, width, parts, PLACES: tl.constexpr, GELU: tl.constexpr):
    wait_for_last()
    row = (tl.program_id(0) // parts).to(tl.int64)
    place = tl.program_id(0) % parts * PLACES + tl.arange(0, PLACES)
    kept = place < width
    gates = raw(gate_up) + row * row_stride
    dtype: tl.constexpr = out.dtype.element_ty
    gate = widened(tl.load(gates + place, mask=kept, other=0))
    up = widened(tl.load(gates + width + place, mask=kept, other=0))
    tl.store(raw(out) + row * width + place, narrowed(activated(gate, GELU) * up, dtype), mask=kept)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """silu, or gelu by its tangent, of float32 numbers."""
    exponent = gate * (_GELU_FIRST + _GELU_THIRD * (gate * gate)) if GELU else -gate
    return tl.div_rn(gate, 1.0 + tl.exp(exponent))
