"""Causal attention over a paged KV cache, for a packed batch of sequences of unlike lengths, and the cache's writer.

The cache of one layer is two tensors (N blocks, K heads, P tokens per block, E). A sequence owns the blocks its row of
the block table names, in order; token i of a sequence sits in slot ``block_table[i // P] * P + i % P``. Slots that no
sequence has written may hold anything, NaN included.
"""

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.attention_check import HeadGroups, even_groups
from tightwire.kernels.cpu.attention import paged_attention_cpu
from tightwire.kernels.cpu.kv_cache import write_kv_cpu


def write_kv_reference(
    k_TKE: Tensor, v_TKE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> None:
    """Store this step's keys and values at their slots (block * P + offset within the block)."""
    tokens_per_block = k_cache_NKPE.shape[2]
    block_T = torch.div(slot_T, tokens_per_block, rounding_mode="floor").long()
    offset_T = (slot_T % tokens_per_block).long()
    k_cache_NKPE[block_T, :, offset_T] = k_TKE
    v_cache_NKPE[block_T, :, offset_T] = v_TKE


def paged_attention_reference(
    q_THE: Tensor,
    k_cache_NKPE: Tensor,
    v_cache_NKPE: Tensor,
    query_start_B1: Tensor,
    context_lens_B: Tensor,
    block_table_BM: Tensor,
    scale: float,
    *,
    num_decode_rows: int = 0,
    groups: HeadGroups | None = None,
) -> Tensor:
    """``softmax(q k^T * scale) v`` per sequence, in plain torch, whatever a row is.

    Gathers every sequence's keys and values into one packed (S, H, E), KV heads repeated for their query heads, and
    attends once under a block-diagonal causal mask.

    Cost: T * H * S scores, S the sum of all context lengths: right, not fast.
    """
    per_kv_head, skipped_heads = groups or even_groups(q_THE, k_cache_NKPE)
    kv_head_H = (torch.arange(q_THE.shape[1], device=q_THE.device) + skipped_heads) // per_kv_head
    tokens_per_block = k_cache_NKPE.shape[2]
    key_seq_S, key_pos_S = _sequence_and_position(context_lens_B)
    query_lens_B = query_start_B1.diff()
    query_seq_T, query_pos_T = _sequence_and_position(query_lens_B)
    query_pos_T = query_pos_T + (context_lens_B - query_lens_B).long()[query_seq_T]

    block_S = block_table_BM[key_seq_S, key_pos_S // tokens_per_block].long()
    offset_S = key_pos_S % tokens_per_block
    k_HSE = k_cache_NKPE[block_S, :, offset_S].transpose(0, 1)[kv_head_H]
    v_HSE = v_cache_NKPE[block_S, :, offset_S].transpose(0, 1)[kv_head_H]
    visible_TS = (query_seq_T[:, None] == key_seq_S) & (query_pos_T[:, None] >= key_pos_S)

    q_HTE = q_THE.transpose(0, 1)
    out_1HTE = F.scaled_dot_product_attention(q_HTE[None], k_HSE[None], v_HSE[None], attn_mask=visible_TS, scale=scale)
    return out_1HTE[0].transpose(0, 1).contiguous()


def _sequence_and_position(lens_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each of ``sum(lens)`` packed items: which sequence it belongs to, and its place in it."""
    lens_B = lens_B.long()
    seq = torch.repeat_interleave(torch.arange(len(lens_B), device=lens_B.device), lens_B)
    first = lens_B.cumsum(0) - lens_B
    return seq, torch.arange(len(seq), device=lens_B.device) - first[seq]


def write_kv(k_TKE: Tensor, v_TKE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor) -> None:
    """Store this step's keys and values in the cache at their slots, in place.

    Args:
        k_TKE, v_TKE: (T, K, E) in the cache's dtype; may be views into a wider matrix as long as E is contiguous.
        slot_T: (T,) int32, block * P + offset within the block.
    Raises:
        ValueError: on CPU, shapes or dtypes that do not fit together, or a slot outside the cache (what came before
            it is written).
    """
    if k_cache_NKPE.device.type != "cpu":
        write_kv_reference(k_TKE, v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    else:
        write_kv_cpu(k_TKE, v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)


def paged_attention(
    q_THE: Tensor,
    k_cache_NKPE: Tensor,
    v_cache_NKPE: Tensor,
    query_start_B1: Tensor,
    context_lens_B: Tensor,
    block_table_BM: Tensor,
    scale: float,
    *,
    num_decode_rows: int = 0,
    groups: HeadGroups | None = None,
) -> Tensor:
    """Causal attention of this step's packed queries over each sequence's cached tokens, this step's included.

    Sequence b's queries are rows ``query_start[b]`` to ``query_start[b + 1]`` of q and stand for its last tokens.
    A row's bits depend on its own sequence alone, and on a GPU on whether it is one of the ``num_decode_rows``
    (``attention_cpu_kernels``, ``attention_triton``).

    Args:
        q_THE: (T, H, E); may be a view into a wider matrix as long as E is contiguous.
        k_cache_NKPE, v_cache_NKPE: (N, K, P, E).
        query_start_B1: (B + 1,) int32, from 0 to T.
        context_lens_B: (B,) int32, tokens in the cache, at least the sequence's queries.
        block_table_BM: (B, M) int32; entries past a sequence's last block are not read.
        num_decode_rows: the first so many rows are generated tokens; no sequence has rows of both kinds.
        groups: which query heads share a KV head; None: H is a multiple of K, and groups are equal.
    Returns:
        (T, H, E), contiguous, in q's dtype.
    Raises:
        ValueError: shapes, dtypes or (on CPU) lengths and block numbers that do not fit together.
    """
    arguments = (q_THE, k_cache_NKPE, v_cache_NKPE, query_start_B1, context_lens_B, block_table_BM, scale)
    if q_THE.is_cuda:  # imported when a GPU asks for it: a CPU host need not have Triton
        triton = import_module("tightwire.kernels.cuda.attention")
        return triton.paged_attention(*arguments, num_decode_rows=num_decode_rows, groups=groups)
    return paged_attention_cpu(*arguments, num_decode_rows=num_decode_rows, groups=groups)
