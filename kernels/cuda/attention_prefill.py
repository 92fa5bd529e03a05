"""Attention of prefill rows on a GPU: one program per tile of queries, with an online softmax over tiles of keys.

A program handles up to QUERIES tokens of one sequence, times the query heads of one KV head. Key tiles at the diagonal
are masked, those before it need no mask, and those beyond it are skipped. A program finds its tile from ``query_start``
on the device, so the host need not read the device to know the number of programs.

Source: FlashAttention-2, arXiv 2307.08691.
"""

# Type checkers cannot follow a kernel's body: constants have the attributes of the objects they stand for.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.attention_tiles import attend_keys, load_operand, no_keys, sequence_of
from tightwire.kernels.cuda.launch import launch, padded
from tightwire.kernels.cuda.numbers import narrowed, raw
from tightwire.kernels.spec.attention import HeadGroups, PackedSequences


def tile_sizes(width: int, heads_per_kv_head: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return rows of a tile, keys of a key tile, and warps, for heads padded to ``width`` numbers.

    The same for every batch, or a row's bits would depend on it. Two key tiles in flight fit the 99 KiB of shared
    memory that a program gets on an L40 or RTX 4090, and with up to 32 heads a KV head ptxas finds registers for them
    on all GPUs from the A100 to the H200 (in float32 it spills up to four of a thread's).
    """
    if dtype == torch.float32:
        rows, keys = 32, 16
    else:
        rows, keys = (128, 64) if width <= 128 else (64, 32)
    return padded(heads_per_kv_head, rows), keys, 8


def attend_prefill_rows(
    q_THE: Tensor,
    k_cache_NKPE: Tensor,
    v_cache_NKPE: Tensor,
    sequences: PackedSequences,
    scale_log2: float,
    groups: HeadGroups,
    out_THE: Tensor,
) -> None:
    """Compute ``attention.paged_attention`` for the rows after the decode rows into ``out_THE``.

    Cost: one launch; at most B programs per KV head find no tile and exit.
    """
    query_start_B1, context_lens_B, block_table_BM, first_row = sequences
    num_tokens, num_heads, head_dim = q_THE.shape
    _, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    num_seqs, per_kv_head = len(context_lens_B), groups.heads_per_kv_head
    width = padded(head_dim, 16)
    rows, keys, num_warps = tile_sizes(width, per_kv_head, q_THE.dtype)
    num_tiles = (num_tokens - first_row) // (rows // per_kv_head) + num_seqs
    launch(
        _attend_tile,
        num_tiles * num_kv_heads,
        q_THE.device,
        q_THE,
        k_cache_NKPE,
        v_cache_NKPE,
        query_start_B1,
        context_lens_B,
        block_table_BM,
        out_THE,
        num_tiles,
        num_seqs,
        first_row,
        block_table_BM.stride(0),
        *q_THE.stride()[:2],
        k_cache_NKPE.stride(0),
        scale_log2,
        num_heads,
        num_kv_heads,
        per_kv_head,
        groups.skipped_heads,
        head_dim,
        tokens_per_block,
        rows,
        width,
        keys,
        num_warps=num_warps,
    )


@triton.jit(do_not_specialize=["num_tiles", "num_seqs", "first_row", "table_stride", "scale_log2"])
def _attend_tile(
    q,
    k_cache,
    v_cache,
    query_start,
    context_lens,
    block_table,
    out,
    num_tiles,
    num_seqs,
    first_row,
    table_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    scale_log2,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PER_KV_HEAD: tl.constexpr,
    SKIPPED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // PER_KV_HEAD
    kv_head = tl.program_id(0) % KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // KV_HEADS  # a prompt's last tiles have most keys: they start first
    seq = sequence_of(tile, query_start, num_seqs, first_row, QUERIES, 1)
    seq_start = tl.load(query_start + seq)
    seq_end = tl.load(query_start + seq + 1)
    token = seq_start + (tile - seq - tl.maximum(seq_start - first_row, 0) // QUERIES) * QUERIES
    if seq_start < first_row or token >= seq_end:
        return
    position = tl.load(context_lens + seq) - (seq_end - token)
    end = position + tl.minimum(QUERIES, seq_end - token)

    row_R = tl.arange(0, ROWS)
    token_R = token + row_R // PER_KV_HEAD
    head_R = kv_head * PER_KV_HEAD - SKIPPED + row_R % PER_KV_HEAD
    position_R = position + row_R // PER_KV_HEAD
    dim_E = tl.arange(0, WIDTH)
    kept_R = (row_R < QUERIES * PER_KV_HEAD) & (token_R < seq_end) & (head_R >= 0) & (head_R < HEADS)
    kept_RE = kept_R[:, None] & (dim_E < HEAD_DIM)[None, :]
    q_place_R = token_R.to(tl.int64) * q_token_stride + head_R * q_head_stride
    q_RE = load_operand(q, q_place_R[:, None] + dim_E[None, :], kept_RE)

    blocks = block_table + seq.to(tl.int64) * table_stride
    head_place = kv_head * (PAGE * HEAD_DIM)
    whole_end = (position + 1) // KEYS * KEYS  # key tiles before it are seen by the first row, so by all
    state = no_keys(ROWS, WIDTH)
    for first in range(0, whole_end, KEYS):
        state = attend_keys(
            q_RE, state, k_cache, v_cache, blocks, head_place, block_stride, scale_log2, first, end, position_R,
            HEAD_DIM, WIDTH, KEYS, PAGE, True,
        )  # fmt: skip
    for first in range(whole_end, end, KEYS):
        state = attend_keys(
            q_RE, state, k_cache, v_cache, blocks, head_place, block_stride, scale_log2, first, end, position_R,
            HEAD_DIM, WIDTH, KEYS, PAGE, False,
        )  # fmt: skip
    _, total_R, sum_RE = state
    out_place_R = (token_R.to(tl.int64) * HEADS + head_R) * HEAD_DIM
    mixed_RE = narrowed(sum_RE / total_R[:, None], out.dtype.element_ty)
    tl.store(raw(out) + out_place_R[:, None] + dim_E[None, :], mixed_RE, mask=kept_RE)
