"""Functions of both GPU attention kernels: find a sequence in the packed batch, and attend to one tile of keys.

A tile of R rows belongs to one sequence and one KV head: some tokens times the query heads of that KV head, so keys and
values are read once for all of them. Its state is each row's largest score (base-2 exponent), the sum of its weights
relative to that maximum, and the weighted sum of the values. Key tiles begin at multiples of
their size from position 0. A tile of masked keys changes nothing: the weights are 0, the rescaling is 1.
"""

from dataclasses import dataclass
from typing import Self

import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import padded
from tightwire.kernels.cuda.numbers import INTERPRETED, load_operand, narrowed, raw, widened
from tightwire.kernels.spec.attention import LOG2_E, AttentionForm

LOWEST = tl.constexpr(-3.0e38)  # the maximum before any score: finite, because inf - inf is not 0
_HIDDEN = tl.constexpr(float("-inf"))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of an attention kernel, which are constants of the compiled kernel."""

    heads: int
    kv_heads: int
    per_kv_head: int
    skipped_heads: int  # heads of the first group that this rank lacks
    head_dim: int
    width: int  # numbers of a row: head_dim, padded
    page: int  # tokens per block
    rows: int  # rows of a tile
    keys: int  # keys of a key tile
    cap_log2: float  # scores become cap * tanh(score / cap), in units of base-2 exponents; 0: they do not
    stored: int  # numbers of a token's head in the cache
    turned: int  # pairs of numbers of a key's bias that are rotated; 0: there is no bias

    @classmethod
    def of(cls, q_THE: Tensor, k_cache_NKPE: Tensor, form: AttentionForm, tile: tuple[int, int]) -> Self:
        """The shape for these tensors; ``tile``: its rows and keys."""
        _, num_kv_heads, tokens_per_block, stored = k_cache_NKPE.shape
        _, num_heads, head_dim = q_THE.shape
        groups = form.groups_of(q_THE, k_cache_NKPE)
        sizes = head_dim, padded(head_dim, 16), tokens_per_block
        turned = 0 if form.key_bias is None else form.key_bias.cos_SN.shape[1]
        return cls(num_heads, num_kv_heads, *groups, *sizes, *tile, form.cap * LOG2_E, stored, turned)

    @property
    def head_numbers(self) -> int:
        """Numbers of one KV head in a block."""
        return self.page * self.stored


@triton.jit
def sequence_of(item, query_start, num_seqs, first_row, TILE: tl.constexpr, GAP: tl.constexpr):
    """The sequence that ``item`` belongs to, by binary search: the last one whose first item is not after it.

    Rows (TILE 1, GAP 0) are packed. Tiles of TILE rows are numbered with a gap of up to one before each sequence (GAP
    1), so that a sequence's first number follows from ``query_start`` alone, without a sum over those before. Rows
    before ``first_row`` have no tiles.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.maximum(tl.load(query_start + middle) - first_row, 0) // TILE + middle * GAP <= item:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load_stored(source, places, mask, dtype: tl.constexpr):
    """Load numbers of the cache's type as operands of ``dtype``."""
    if source.dtype.element_ty == dtype:
        stored = load_operand(source, places, mask)
    else:
        other = tl.load(raw(source) + places) if mask is None else tl.load(raw(source) + places, mask=mask, other=0)
        stored = _rounded_operand(widened(other), dtype)
    return stored


@triton.jit
def _load_scales(source, places, mask):
    """Load the bfloat16 scales at ``places``, in bytes, of an int8 cache as float32."""
    pointers = (source + places).to(tl.pointer_type(tl.int16), bitcast=True)
    return widened(tl.load(pointers, mask=mask, other=0))


@triton.jit
def load_bias(bias, kv_head, shape: tl.constexpr):
    """Return a head's (E,) bias, and what turns with it: of each rotated number the other of its pair, with its sign."""
    dim_E = tl.arange(0, shape.width)
    kept_E = dim_E < shape.head_dim
    other_E = tl.where(dim_E < shape.turned, dim_E + shape.turned, dim_E - shape.turned)
    place = bias + kv_head * shape.head_dim
    own_E = tl.load(place + dim_E, mask=kept_E, other=0.0)
    paired_E = tl.load(place + other_E, mask=kept_E & (dim_E < 2 * shape.turned), other=0.0)
    return own_E, tl.where(dim_E < shape.turned, -paired_E, paired_E)


@triton.jit
def _turned_bias(bias, key_N, mask_N, shape: tl.constexpr):
    """Return (N, E), the bias of keys turned to their positions."""
    pair, cos, sin = bias
    own_E, paired_E = pair
    dim_E = tl.arange(0, shape.width)
    place_NE = (key_N * shape.turned)[:, None] + (dim_E % shape.turned)[None, :]
    mask_NE = mask_N[:, None] & (dim_E < 2 * shape.turned)[None, :]
    cos_NE = tl.load(cos + place_NE, mask=mask_NE, other=1.0)
    sin_NE = tl.load(sin + place_NE, mask=mask_NE, other=0.0)
    return own_E[None, :] * cos_NE + paired_E[None, :] * sin_NE


@triton.jit
def _rounded_operand(x, dtype: tl.constexpr):
    """Round float32 to ``dtype``, in a type that ``tl.dot`` takes."""
    return widened(narrowed(x, dtype)) if INTERPRETED else x.to(dtype)


@triton.jit
def attend_keys(q_RE, state, caches, places, bias, shape: tl.constexpr, dtype: tl.constexpr, WHOLE: tl.constexpr):
    """Return a tile's state after the key tile at ``first``. A row attends to keys up to its own position.

    ``caches`` are those of keys and of values, and their block stride. In ``places``, ``blocks`` is the sequence's row of the
    block table, ``head_place`` the KV head's offset in a block. WHOLE: no key is masked. Otherwise keys from ``end`` on are
    not read; they may be NaN. ``window``: a row attends to so many keys, its own included; 0: to all. ``bias``: of keys, by
    ``load_bias``, then its cosines and sines. ``dtype``: of products.
    """
    blocks, head_place, scale_log2, first, end, position_R, window = places
    maximum_R, total_R, sum_RE = state
    k_cache, v_cache, block_stride = caches
    INT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    key_N = first + tl.arange(0, shape.keys)
    dim_E = tl.arange(0, shape.width)
    index_N = blocks + key_N // shape.page
    block_N = tl.load(index_N) if WHOLE else tl.load(index_N, mask=key_N < end, other=0)
    head_N = block_N.to(tl.int64) * block_stride + head_place
    place_N = head_N + key_N % shape.page * shape.head_dim
    scale_N = head_N + shape.page * shape.head_dim + key_N % shape.page * 2  # of int8 caches
    if not WHOLE:
        mask_NE = (key_N < end)[:, None] & (dim_E < shape.head_dim)[None, :]
    elif shape.head_dim < shape.width:
        mask_NE = (dim_E < shape.head_dim)[None, :]
    else:
        mask_NE = None
    place_NE = place_N[:, None] + dim_E[None, :]
    k_NE = _load_stored(k_cache, place_NE, mask_NE, dtype)
    k_scale_N = _load_scales(k_cache, scale_N, key_N < end) if INT8 else None
    if shape.turned > 0:
        k_NE = k_NE.to(tl.float32) if k_scale_N is None else k_NE.to(tl.float32) * k_scale_N[:, None]
        k_NE = _rounded_operand(k_NE + _turned_bias(bias, key_N, key_N < end, shape), dtype)
    score_RN = tl.dot(q_RE, tl.trans(k_NE), input_precision="ieee")
    if INT8 and shape.turned == 0:
        score_RN = score_RN * k_scale_N[None, :]
    if shape.cap_log2 > 0:
        score_RN = score_RN * scale_log2
        score_RN = shape.cap_log2 - 2 * shape.cap_log2 / (tl.exp(score_RN * (2 / shape.cap_log2)) + 1)
        scale_log2 = scale_log2 * 0 + 1.0
    if not WHOLE:
        seen_RN = key_N[None, :] <= position_R[:, None]
        if window > 0:
            seen_RN = seen_RN & (position_R[:, None] - key_N[None, :] < window)
        score_RN = tl.where(seen_RN, score_RN, _HIDDEN)
    risen_R = tl.maximum(maximum_R, tl.max(score_RN, 1) * scale_log2)
    weight_RN = tl.exp2(tl.fma(score_RN, scale_log2, -risen_R[:, None]))
    shrink_R = tl.exp2(maximum_R - risen_R)
    total_R = total_R * shrink_R + tl.sum(weight_RN, 1)
    v_NE = _load_stored(v_cache, place_NE, mask_NE, dtype)
    if INT8:
        weight_RN = weight_RN * _load_scales(v_cache, scale_N, key_N < end)[None, :]
    sum_RE = tl.dot(_rounded_operand(weight_RN, dtype), v_NE, sum_RE * shrink_R[:, None], input_precision="ieee")
    return risen_R, total_R, sum_RE


@triton.jit
def no_keys(shape: tl.constexpr):
    """Return the initial state of a tile."""
    rows: tl.constexpr = shape.rows
    width: tl.constexpr = shape.width
    return tl.full((rows,), LOWEST, tl.float32), tl.zeros((rows,), tl.float32), tl.zeros((rows, width), tl.float32)
