"""Paged attention in torch, its argument checks, and the writer of the KV cache.

The cache of one layer is two tensors (N blocks, K heads, P tokens per block, E), or in 8 bits (N, K, P, E + 2) with the
layout of ``int8_heads``. A sequence owns the blocks in its row of the block table, in that order; token i of a sequence
is in slot ``block_table[i // P] * P + i % P``. Slots that no sequence has written may hold anything, NaN included.
"""

import math
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.spec.int8_heads import cache_width, parts_of, quantize_heads_reference

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)
LOG2_E = 1 / math.log(2)


class HeadGroups(NamedTuple):
    """Groups of neighbouring query heads that share a KV head, ``heads_per_kv_head`` each.

    A rank's heads may begin and end inside a group: the first ``skipped_heads`` of the first group are missing, and some of the
    last group may be.
    """

    heads_per_kv_head: int
    skipped_heads: int

    @classmethod
    def of_part(cls, num_heads: int, num_kv_heads: int, heads_per_kv_head: int, skipped_heads: int) -> Self:
        """The groups of a rank's heads. Missing heads of a single group need no space in a kernel's tiles."""
        return cls(num_heads, 0) if num_kv_heads == 1 else cls(heads_per_kv_head, skipped_heads)


class PackedSequences(NamedTuple):
    """The sequences of a packed batch and their blocks. Sequence b's queries are its last tokens."""

    query_start_B1: Tensor  # int32: the first row of each sequence's queries, then T
    context_lens_B: Tensor  # int32, tokens in the cache, at least the sequence's queries
    block_table_BM: Tensor  # int32; entries past a sequence's last block are not read
    num_decode_rows: int = 0  # decode rows come first; no sequence has rows of both kinds
    # int32 zeros for the decode rows and KV heads, on a GPU, which leaves zeros. None: a call makes some.
    arrivals_TK: Tensor | None = None


class KeyBias(NamedTuple):
    """A bias of keys that the cache lacks: attention turns it to each key's position and adds it."""

    bias_KE: Tensor  # float32, before its rotation
    cos_SN: Tensor  # float32, of every position; the first 2 N numbers of a head are rotated
    sin_SN: Tensor


class AttentionForm(NamedTuple):
    """How a layer attends."""

    scale: float
    groups: HeadGroups | None = None  # of query heads; by default all KV heads have as many
    window: int = 0  # a row attends to this many tokens, its own included; 0: to all up to its own
    cap: float = 0.0  # scores become ``cap * tanh(score / cap)``; 0: they do not
    key_bias: KeyBias | None = None  # of keys that were cached without it

    def groups_of(self, q_THE: Tensor, k_cache_NKPE: Tensor) -> HeadGroups:
        return self.groups or HeadGroups(q_THE.shape[1] // k_cache_NKPE.shape[1], 0)


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, sequences: PackedSequences, form: AttentionForm
) -> None:
    """Raise ValueError unless shapes, dtypes, strides and devices are those that the kernels need."""
    start, lens, table, num_decode_rows, arrivals = sequences
    shape, strides, key_bias = k_cache.shape, k_cache.stride(), form.key_bias
    _, num_kv_heads, tokens_per_block, width = shape
    head_dim = q.shape[2]
    per_kv_head, skipped = form.groups_of(q, k_cache)
    in_groups = 0 <= skipped < per_kv_head and -(-(skipped + q.shape[1]) // per_kv_head) == num_kv_heads
    if not in_groups or cache_width(head_dim, k_cache.dtype) != width or v_cache.shape != shape:
        raise ValueError(
            "attention needs q (T, H, E), caches (N, K, P, E), or of int8 (N, K, P, E + 2), and as many groups of query heads as "
            f"KV heads; got q {tuple(q.shape)} in groups of {per_kv_head} without the first {skipped}, caches {tuple(shape)} "
            f"and {tuple(v_cache.shape)}"
        )
    if q.dtype not in NUMBERS or k_cache.dtype not in (*NUMBERS, torch.int8) or v_cache.dtype != k_cache.dtype:
        needs = f"attention supports {', '.join(map(str, NUMBERS))}, for caches also torch.int8, the same for both"
        raise ValueError(f"{needs}; got q {q.dtype}, caches {k_cache.dtype} and {v_cache.dtype}")
    if q.stride(2) != 1 or strides[1:] != (tokens_per_block * width, width, 1) or v_cache.stride() != strides:
        needs = "attention needs contiguous heads, contiguous cache blocks, and caches of the same layout"
        raise ValueError(f"{needs}; got strides q {q.stride()}, caches {strides} and {v_cache.stride()}")
    num_seqs = table.shape[0]
    if start.shape[0] != num_seqs + 1 or lens.shape[0] != num_seqs:
        needs = f"attention of {num_seqs} sequences needs {num_seqs + 1} query starts and {num_seqs} context lengths"
        raise ValueError(f"{needs}; got {start.shape[0]} and {lens.shape[0]}")
    if arrivals is not None and arrivals.shape != (num_decode_rows, num_kv_heads):
        wanted = (num_decode_rows, num_kv_heads)
        raise ValueError(f"attention counts arrivals in {wanted} int32, got {tuple(arrivals.shape)}")
    if key_bias is not None:
        _check_key_bias(key_bias, num_kv_heads, head_dim, k_cache.dtype)
    indices = [each for each in sequences if isinstance(each, Tensor)]
    devices = {tensor.device for tensor in (q, k_cache, v_cache, *indices, *(key_bias or ()))}
    if len(devices) > 1 or any(index.dtype != torch.int32 or index.stride(-1) != 1 for index in indices):
        given = f"{', '.join(str(index.dtype) for index in indices)} on {', '.join(map(str, devices))}"
        raise ValueError(f"attention needs index tensors in int32, contiguous, and one device for all; got {given}")


def _check_key_bias(key_bias: KeyBias, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype) -> None:
    if cache_dtype != torch.int8:
        raise ValueError(f"a bias of keys is added to caches in torch.int8, got {cache_dtype}")
    bias, cos, sin = key_bias
    fits = bias.shape == (num_kv_heads, head_dim) and cos.shape == sin.shape and 0 < 2 * cos.shape[1] <= head_dim
    if not fits or any(each.dtype != torch.float32 or not each.is_contiguous() for each in key_bias):
        needs = f"a bias of keys is ({num_kv_heads}, {head_dim}) with cosines and sines (S, {head_dim // 2} or less)"
        given = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in key_bias)
        raise ValueError(f"{needs}, contiguous float32; got {given}")


def write_kv_reference(
    k_TKE: Tensor, v_TKE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> None:
    """Store this step's keys and values at their slots (block * P + offset within the block), in the caches' format."""
    tokens_per_block = k_cache_NKPE.shape[2]
    block_T = torch.div(slot_T, tokens_per_block, rounding_mode="floor").long()
    offset_T = (slot_T % tokens_per_block).long()
    for x_TKE, cache in ((k_TKE, k_cache_NKPE), (v_TKE, v_cache_NKPE)):
        if cache.dtype == torch.int8:
            for part, stored in zip(parts_of(cache), quantize_heads_reference(x_TKE), strict=True):
                part[block_T, :, offset_T] = stored
        else:
            cache[block_T, :, offset_T] = x_TKE.to(cache.dtype)


def paged_attention_reference(
    q_THE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, sequences: PackedSequences, form: AttentionForm
) -> Tensor:
    """``softmax(q k^T * scale) v`` per sequence; see ``attention.paged_attention``. Cost: T * H * S scores, S all contexts' tokens."""
    query_start_B1, context_lens_B, block_table_BM = sequences[:3]
    scale, _, window, cap, key_bias = form
    per_kv_head, skipped_heads = form.groups_of(q_THE, k_cache_NKPE)
    kv_head_H = (torch.arange(q_THE.shape[1], device=q_THE.device) + skipped_heads) // per_kv_head
    tokens_per_block = k_cache_NKPE.shape[2]
    key_seq_S, key_pos_S = _sequence_and_position(context_lens_B)
    query_lens_B = query_start_B1.diff()
    query_seq_T, query_pos_T = _sequence_and_position(query_lens_B)
    query_pos_T = query_pos_T + (context_lens_B - query_lens_B).long()[query_seq_T]
    visible_TS = (query_seq_T[:, None] == key_seq_S) & (query_pos_T[:, None] >= key_pos_S)
    if window:
        visible_TS &= query_pos_T[:, None] - key_pos_S < window
    seen_S = visible_TS.any(0)  # keys before the window have no blocks
    visible_TS, key_seq_S, key_pos_S = visible_TS[:, seen_S], key_seq_S[seen_S], key_pos_S[seen_S]

    block_S = block_table_BM[key_seq_S, key_pos_S // tokens_per_block].long()
    offset_S = key_pos_S % tokens_per_block
    k_SKE, v_SKE = (_read(cache, block_S, offset_S) for cache in (k_cache_NKPE, v_cache_NKPE))
    if key_bias is not None:
        k_SKE = k_SKE.float() + turned_bias(key_bias, key_pos_S)
    k_HSE, v_HSE = (x_SKE.transpose(0, 1)[kv_head_H] for x_SKE in (k_SKE, v_SKE))

    q_HTE = q_THE.transpose(0, 1)
    if len({q_HTE.dtype, k_HSE.dtype, v_HSE.dtype}) > 1:
        q_HTE, k_HSE, v_HSE = q_HTE.float(), k_HSE.float(), v_HSE.float()
    if cap:
        score_HTS = (q_HTE.float() @ k_HSE.float().transpose(1, 2)) * scale
        score_HTS = (cap * torch.tanh(score_HTS / cap)).masked_fill(~visible_TS, float("-inf"))
        weight_HTS = score_HTS.softmax(-1).to(v_HSE.dtype)
        return (weight_HTS @ v_HSE).transpose(0, 1).to(q_THE.dtype).contiguous()
    out_1HTE = F.scaled_dot_product_attention(q_HTE[None], k_HSE[None], v_HSE[None], attn_mask=visible_TS, scale=scale)
    return out_1HTE[0].transpose(0, 1).to(q_THE.dtype).contiguous()


def _read(cache_NKPE: Tensor, block_S: Tensor, offset_S: Tensor) -> Tensor:
    """Return (S, K, E) numbers of the cache, float32 if it is in 8 bits."""
    if cache_NKPE.dtype != torch.int8:
        return cache_NKPE[block_S, :, offset_S]
    codes, scales = (part[block_S, :, offset_S].float() for part in parts_of(cache_NKPE))
    return codes * scales.unsqueeze(-1)


def turned_bias(key_bias: KeyBias, position_S: Tensor) -> Tensor:
    """Return (S, K, E), the bias rotated to each position."""
    bias_SKE = key_bias.bias_KE.expand(len(position_S), -1, -1)
    return apply_rope_reference(bias_SKE, key_bias.cos_SN[position_S], key_bias.sin_SN[position_S])


def apply_rope_reference(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` in float32, rounded once to the dtype of x.

    Angles are (T, N) float32 and rotate the first 2 N numbers of each head.
    """
    cos_T1E, sin_T1E = cos_TE.unsqueeze(1), sin_TE.unsqueeze(1)
    turned = 2 * cos_TE.shape[1]
    first, second = x_THE[..., :turned].float().chunk(2, dim=-1)
    rotated_THE = torch.cat((first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E), dim=-1)
    return torch.cat((rotated_THE.to(x_THE.dtype), x_THE[..., turned:]), dim=-1)


def _sequence_and_position(lens_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each of ``sum(lens)`` packed items: its sequence, and its place in it."""
    lens_B = lens_B.long()
    seq = torch.repeat_interleave(torch.arange(len(lens_B), device=lens_B.device), lens_B)
    first = lens_B.cumsum(0) - lens_B
    return seq, torch.arange(len(seq), device=lens_B.device) - first[seq]
