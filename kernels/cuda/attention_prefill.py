"""Attention of prefill rows on a GPU: one program per tile of queries, with an online softmax over tiles of keys.

A program handles up to QUERIES tokens of one sequence, times the query heads of one KV head. Key tiles at the diagonal
are masked, those before it need no mask, and those beyond it are skipped. A program finds its tile from ``query_start``
on the device, so the host need not read the device to know the number of programs.

Source: FlashAttention-2, arXiv 2307.08691.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.attention_tiles import AttentionShape, attend_keys, load_bias, no_keys, sequence_of
from tightwire.kernels.cuda.launch import NUM_STAGES, launch, padded, wait_for_last
from tightwire.kernels.cuda.numbers import load_operand, narrowed, raw
from tightwire.kernels.spec.attention import LOG2_E, AttentionForm, PackedSequences

BIASED_STAGES = 1  # with a bias of keys: two tiles of cosines and sines in flight need too much shared memory


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
    form: AttentionForm,
    out_THE: Tensor,
) -> None:
    """Compute the rows after the decode rows into ``out_THE``; one launch."""
    query_start_B1, context_lens_B, block_table_BM, first_row = sequences[:4]
    num_tokens, _, head_dim = q_THE.shape
    num_kv_heads, num_seqs = k_cache_NKPE.shape[1], len(context_lens_B)
    per_kv_head = form.groups_of(q_THE, k_cache_NKPE).heads_per_kv_head
    width = padded(head_dim, 16)
    rows, keys, num_warps = tile_sizes(width, per_kv_head, q_THE.dtype)
    num_tiles = (num_tokens - first_row) // (rows // per_kv_head) + num_seqs
    shape = AttentionShape.of(q_THE, k_cache_NKPE, form, (rows, keys))
    biases = form.key_bias or 3 * [q_THE]
    tensors = q_THE, k_cache_NKPE, v_cache_NKPE, *biases, query_start_B1, context_lens_B, block_table_BM, out_THE
    strides = block_table_BM.stride(0), *q_THE.stride()[:2], k_cache_NKPE.stride(0)
    given = *tensors, num_tiles, num_seqs, first_row, *strides, form.scale * LOG2_E, form.window, shape
    num_stages = BIASED_STAGES if form.key_bias else NUM_STAGES
    launch(_attend_tile, num_tiles * num_kv_heads, q_THE.device, *given, num_warps=num_warps, num_stages=num_stages)


@triton.jit(do_not_specialize=["num_tiles", "num_seqs", "first_row", "table_stride", "scale_log2", "window"])
def _attend_tile(
    q,
    k_cache,
    v_cache,
    bias,
    cos,
    sin,
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
    window,
    shape: tl.constexpr,
):
    wait_for_last()
    QUERIES: tl.constexpr = shape.rows // shape.per_kv_head
    kv_head = tl.program_id(0) % shape.kv_heads
    tile = num_tiles - 1 - tl.program_id(0) // shape.kv_heads  # a prompt's last tiles have most keys: they start first
    seq = sequence_of(tile, query_start, num_seqs, first_row, QUERIES, 1)
    seq_start = tl.load(query_start + seq)
    seq_end = tl.load(query_start + seq + 1)
    token = seq_start + (tile - seq - tl.maximum(seq_start - first_row, 0) // QUERIES) * QUERIES
    if seq_start < first_row or token >= seq_end:
        return
    position = tl.load(context_lens + seq) - (seq_end - token)
    end = position + tl.minimum(QUERIES, seq_end - token)

    row_R = tl.arange(0, shape.rows)
    token_R = token + row_R // shape.per_kv_head
    head_R = kv_head * shape.per_kv_head - shape.skipped_heads + row_R % shape.per_kv_head
    position_R = position + row_R // shape.per_kv_head
    dim_E = tl.arange(0, shape.width)
    kept_R = (row_R < QUERIES * shape.per_kv_head) & (token_R < seq_end) & (head_R >= 0) & (head_R < shape.heads)
    kept_RE = kept_R[:, None] & (dim_E < shape.head_dim)[None, :]
    q_place_R = token_R.to(tl.int64) * q_token_stride + head_R * q_head_stride
    q_RE = load_operand(q, q_place_R[:, None] + dim_E[None, :], kept_RE)

    blocks = block_table + seq.to(tl.int64) * table_stride
    head_place = kv_head * shape.head_numbers
    bias_pair = load_bias(bias, kv_head, shape) if shape.turned > 0 else (0, 0)
    turning = bias_pair, cos, sin
    whole_end = (position + 1) // shape.keys * shape.keys  # key tiles before it are seen by the first row, so by all
    caches = k_cache, v_cache, block_stride
    state = no_keys(shape)
    begin = 0
    if window > 0:  # every key tile needs a mask
        begin = tl.maximum(position + 1 - window, 0) // shape.keys * shape.keys
        whole_end = begin
    for first in range(begin, whole_end, shape.keys):
        places = blocks, head_place, scale_log2, first, end, position_R, window
        state = attend_keys(q_RE, state, caches, places, turning, shape, q.dtype.element_ty, True)
    for first in range(whole_end, end, shape.keys):
        places = blocks, head_place, scale_log2, first, end, position_R, window
        state = attend_keys(q_RE, state, caches, places, turning, shape, q.dtype.element_ty, False)
    _, total_R, sum_RE = state
    out_place_R = (token_R.to(tl.int64) * shape.heads + head_R) * shape.head_dim
    mixed_RE = narrowed(sum_RE / total_R[:, None], out.dtype.element_ty)
    tl.store(raw(out) + out_place_R[:, None] + dim_E[None, :], mixed_RE, mask=kept_RE)
