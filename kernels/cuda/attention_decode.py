"""Attention of decode rows on a GPU: programs process each row's keys in chunks of CHUNK_KEYS, which are then merged.

A decode row reads all its keys and values for a few query heads, so memory bandwidth is the limit, and one program per
row would leave most of the device idle. The number of programs that share a row's chunks is chosen to fill the device.
A row has at most MAX_CHUNKS chunks, which are longer in rows of more keys, so scratch and launches are the same for any
context beyond that. Each chunk is written to its own place in a scratch tensor, and they are merged in order, so a row's
bits depend on its own keys alone.

Source: Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.attention_tiles import LOWEST, AttentionShape, attend_keys, load_bias, no_keys, sequence_of
from tightwire.kernels.cuda.launch import launch, padded
from tightwire.kernels.cuda.numbers import load_operand, narrowed, raw
from tightwire.kernels.spec.attention import LOG2_E, AttentionForm, PackedSequences

# A chunk's partial sums cost 8 E bytes a query head to write and read, against 4 E CHUNK_KEYS of keys and values in 16
# bits: 3 percent with four heads a KV head. Eight KV heads fill an H200 once over with 4096 tokens of one sequence.
CHUNK_KEYS = 256
MAX_CHUNKS = 64  # of 256 keys up to 16,384; one KV head still fills half of an H200 with them
_MERGED_AT_ONCE = 16  # chunks

# Triton uses them for the block table's entries, the keys and values that depend on those, and the arithmetic: with 5, two
# key tiles are in flight, in 38 KiB of shared memory; with 3 and 4, one.
NUM_STAGES = 5
BIASED_STAGES = 3  # with a bias of keys, whose cosines and sines are loaded ahead too, 8 bytes a number

# A program without work costs about a nanosecond, a missing one an idle processor: several for each of them.
_PROGRAMS_PER_PROCESSOR = 16
_INTERPRETED_PROCESSORS = 1

# Rows whose partial sums would take more scratch memory than this go in several rounds, each enough to fill the device.
_SCRATCH_BYTES = 128 << 20  # 126 rows of 32 heads of 128 numbers


def attend_decode_rows(
    q_THE: Tensor,
    k_cache_NKPE: Tensor,
    v_cache_NKPE: Tensor,
    sequences: PackedSequences,
    form: AttentionForm,
    out_THE: Tensor,
    *,
    scratch_bytes: int = _SCRATCH_BYTES,
) -> None:
    """Compute ``attention.paged_attention`` for the decode rows into ``out_THE``; a row without keys becomes zeros.

    Cost: one launch if the block table has room for one chunk, otherwise two for each round of rows; scratch memory of
    4 (E + 2) bytes per head and chunk of the table, at most MAX_CHUNKS.
    """
    query_start_B1, context_lens_B, block_table_BM, num_rows = sequences
    _, num_heads, head_dim = q_THE.shape
    _, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    width = padded(head_dim, 16)
    max_chunks = min(MAX_CHUNKS, -(-block_table_BM.shape[1] * tokens_per_block // CHUNK_KEYS))
    row_bytes = 4 * num_heads * max_chunks * (head_dim + 2)
    rows_at_once = num_rows if max_chunks == 1 else min(num_rows, max(1, scratch_bytes // row_bytes))
    wanted = _PROGRAMS_PER_PROCESSOR * _num_processors(q_THE.device)
    sharing = min(max_chunks, -(-wanted // (rows_at_once * num_kv_heads)))
    sum_TSHE, stat_TSH2 = _scratch(q_THE, rows_at_once, max_chunks)
    rows = padded(form.groups_of(q_THE, k_cache_NKPE).heads_per_kv_head, 16)
    keys = keys_at_once(width, (q_THE if form.key_bias else k_cache_NKPE).dtype)
    num_stages = BIASED_STAGES if form.key_bias else NUM_STAGES
    shape = AttentionShape.of(q_THE, k_cache_NKPE, form, (rows, keys))
    inputs = q_THE, k_cache_NKPE, v_cache_NKPE, *(form.key_bias or 3 * [q_THE]), block_table_BM
    tensors = *inputs, out_THE, sum_TSHE, stat_TSH2
    lengths = query_start_B1, context_lens_B, len(context_lens_B)
    strides = block_table_BM.stride(0), *q_THE.stride()[:2], k_cache_NKPE.stride(0)
    for first_row in range(0, num_rows, rows_at_once):
        round_rows = min(rows_at_once, num_rows - first_row)
        num_programs = round_rows * num_kv_heads * sharing
        given = *tensors, *lengths, first_row, sharing, max_chunks, *strides, form.scale * LOG2_E, form.window
        launch(
            _attend_chunks, num_programs, q_THE.device, *given, shape, CHUNK_KEYS, max_chunks > 1, num_stages=num_stages
        )
        if max_chunks > 1:
            given = sum_TSHE, stat_TSH2, out_THE, *lengths, first_row, max_chunks
            launch(_merge_chunks, round_rows * num_heads, q_THE.device, *given, shape, CHUNK_KEYS, _MERGED_AT_ONCE)


def keys_at_once(width: int, dtype: torch.dtype) -> int:
    """Return the keys of a key tile: 16 KiB of keys and values for heads padded to ``width`` numbers."""
    return min(64, max(16, 8192 // (width * dtype.itemsize)))


def _scratch(q_THE: Tensor, num_rows: int, max_chunks: int) -> tuple[Tensor, Tensor]:
    """Allocate scratch for chunks' weighted sums of values, and for maxima and sums of weights; empty for one chunk."""
    shape = (num_rows, max_chunks, q_THE.shape[1]) if max_chunks > 1 else (0, 0, 0)
    sums = torch.empty((*shape, q_THE.shape[2]), dtype=torch.float32, device=q_THE.device)
    return sums, torch.empty((*shape, 2), dtype=torch.float32, device=q_THE.device)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _keys_of_row(row, query_start, context_lens, num_seqs):
    """Return a packed row's sequence, and the number of keys that it attends to, with its own key last."""
    seq = sequence_of(row, query_start, num_seqs, 0, 1, 0)
    return seq, tl.load(context_lens + seq) - (tl.load(query_start + seq + 1) - row) + 1


@triton.jit
def _chunk_length(num_keys, max_chunks, CHUNK: tl.constexpr):
    """Return the keys of each of a row's chunks but the last: the least multiple of CHUNK that makes at most ``max_chunks``."""
    return tl.maximum(tl.cdiv(num_keys, CHUNK * max_chunks), 1) * CHUNK


@triton.jit(
    do_not_specialize=["num_seqs", "first_row", "sharing", "max_chunks", "table_stride", "scale_log2", "window"]
)
def _attend_chunks(
    q,
    k_cache,
    v_cache,
    bias,
    cos,
    sin,
    block_table,
    out,
    sums,
    stats,
    query_start,
    context_lens,
    num_seqs,
    first_row,
    sharing,
    max_chunks,
    table_stride,
    q_token_stride,
    q_head_stride,
    block_stride,
    scale_log2,
    window,
    shape: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Attend chunks ``share``, ``share + sharing``, ... of one row and KV head to scratch, or one chunk to ``out``."""
    share = tl.program_id(0) % sharing
    kv_head = tl.program_id(0) // sharing % shape.kv_heads
    place = tl.program_id(0) // sharing // shape.kv_heads
    row = first_row + place
    seq, num_keys = _keys_of_row(row, query_start, context_lens, num_seqs)

    row_R = tl.arange(0, shape.rows)
    head_R = kv_head * shape.per_kv_head - shape.skipped_heads + row_R
    position_R = num_keys - 1 + tl.zeros_like(row_R)
    dim_E = tl.arange(0, shape.width)
    kept_R = (row_R < shape.per_kv_head) & (head_R >= 0) & (head_R < shape.heads)
    kept_RE = kept_R[:, None] & (dim_E < shape.head_dim)[None, :]
    q_place_R = row.to(tl.int64) * q_token_stride + head_R * q_head_stride
    q_RE = load_operand(q, q_place_R[:, None] + dim_E[None, :], kept_RE)

    blocks = block_table + seq.to(tl.int64) * table_stride
    caches = k_cache, v_cache, block_stride
    head_place = kv_head * shape.head_numbers
    bias_pair = load_bias(bias, kv_head, shape) if shape.turned > 0 else (0, 0)
    turning = bias_pair, cos, sin
    length = _chunk_length(num_keys, max_chunks, CHUNK)
    for chunk in range(share, tl.maximum(tl.cdiv(num_keys, length), 1), sharing):
        state = no_keys(shape)
        begin = chunk * length
        end = tl.minimum(begin + length, num_keys)
        if window > 0:
            begin = tl.maximum(begin, tl.maximum(num_keys - window, 0) // shape.keys * shape.keys)
        for first in range(begin, end, shape.keys):
            places = blocks, head_place, scale_log2, first, end, position_R, window
            state = attend_keys(q_RE, state, caches, places, turning, shape, q.dtype.element_ty, False)
        maximum_R, total_R, sum_RE = state
        if PARTIAL:
            scratch_R = (place.to(tl.int64) * max_chunks + chunk) * shape.heads + head_R
            tl.store(sums + scratch_R[:, None] * shape.head_dim + dim_E[None, :], sum_RE, mask=kept_RE)
            tl.store(stats + scratch_R * 2, maximum_R, mask=kept_R)
            tl.store(stats + scratch_R * 2 + 1, total_R, mask=kept_R)
        else:
            mixed_RE = narrowed(sum_RE / _divisor(total_R)[:, None], out.dtype.element_ty)
            out_place_R = (row.to(tl.int64) * shape.heads + head_R) * shape.head_dim
            tl.store(raw(out) + out_place_R[:, None] + dim_E[None, :], mixed_RE, mask=kept_RE)


@triton.jit(do_not_specialize=["num_seqs", "first_row", "max_chunks"])
def _merge_chunks(
    sums,
    stats,
    out,
    query_start,
    context_lens,
    num_seqs,
    first_row,
    max_chunks,
    shape: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merge the chunks of one row and query head: rescale to the largest maximum, add in order, AT_ONCE at a time."""
    width: tl.constexpr = shape.width
    head = tl.program_id(0) % shape.heads
    place = tl.program_id(0) // shape.heads
    row = first_row + place
    _, num_keys = _keys_of_row(row, query_start, context_lens, num_seqs)
    num_chunks = tl.maximum(tl.cdiv(num_keys, _chunk_length(num_keys, max_chunks, CHUNK)), 1)

    dim_E = tl.arange(0, width)
    maximum_1, total_1 = tl.full((1,), LOWEST, tl.float32), tl.zeros((1,), tl.float32)
    sum_E = tl.zeros((width,), tl.float32)
    for first in range(0, num_chunks, AT_ONCE):
        chunk_S = first + tl.arange(0, AT_ONCE)
        there_S = chunk_S < num_chunks
        scratch_S = (place.to(tl.int64) * max_chunks + chunk_S) * shape.heads + head
        maximum_S = tl.load(stats + scratch_S * 2, mask=there_S, other=LOWEST)
        total_S = tl.load(stats + scratch_S * 2 + 1, mask=there_S, other=0.0)
        kept_SE = there_S[:, None] & (dim_E < shape.head_dim)[None, :]
        sum_SE = tl.load(sums + scratch_S[:, None] * shape.head_dim + dim_E[None, :], mask=kept_SE, other=0.0)
        risen_1 = tl.maximum(maximum_1, tl.max(maximum_S, 0, keep_dims=True))
        shrink_1 = tl.exp2(maximum_1 - risen_1)
        weight_S = tl.exp2(maximum_S - risen_1)
        total_1 = total_1 * shrink_1 + tl.sum(total_S * weight_S, 0, keep_dims=True)
        sum_E = sum_E * shrink_1 + tl.sum(sum_SE * weight_S[:, None], 0)
        maximum_1 = risen_1
    mixed_E = narrowed(sum_E / _divisor(total_1), out.dtype.element_ty)
    out_E = raw(out) + (row.to(tl.int64) * shape.heads + head) * shape.head_dim + dim_E
    tl.store(out_E, mixed_E, mask=dim_E < shape.head_dim)


@triton.jit
def _divisor(total):
    """Return the sum of weights, or 1 for a row without keys, whose sum is 0."""
    return tl.where(total == 0, 1.0, total)
