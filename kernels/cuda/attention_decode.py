"""Attention of decode rows on a GPU: programs process each row's keys in chunks, and the last program to end merges them.

A decode row reads all its keys and values for a few query heads, so memory bandwidth is the limit, and one program per row would
leave most of the device idle. As many programs share a row's chunks as fill the device. The length of a row's chunks depends on
the number of keys that it attends to, and there are at most MAX_CHUNKS, so longer contexts need no more scratch or launches.

Each chunk is written to its own place in a scratch tensor. Then a program adds one to the count of its row and KV head, with
release and acquire, after a barrier of its threads: so the last one sees what all have written. It merges the chunks in order, and
sets the count back to zero for the next launch. A row's bits depend on its own keys alone. A row of one chunk needs neither.

Source: Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.attention_tiles import LOWEST, AttentionShape, attend_keys, load_bias, no_keys, sequence_of
from tightwire.kernels.cuda.launch import launch, padded, wait_for_last
from tightwire.kernels.cuda.numbers import load_operand, narrowed, raw
from tightwire.kernels.spec.attention import LOG2_E, AttentionForm, PackedSequences

# Rows of up to 1024 keys have up to _FEW_CHUNKS chunks of CHUNK_KEYS. These grow to LONG_CHUNK_KEYS at 4096 keys; then
# there are more, up to MAX_CHUNKS at 16,384, and those grow on. A program's key tiles follow each other, about 0.4 us each.
# A chunk's partial sums cost 8 E bytes a query head to write and read, against 4 E bytes a key of 16 bits: with four
# heads a KV head 12 percent up to 1024 keys, where waiting is the larger cost, and 3 from 4096 on.
CHUNK_KEYS, LONG_CHUNK_KEYS = 64, 256
MAX_CHUNKS = 64  # one KV head still fills half of an H200 with them
_FEW_CHUNKS = 16  # eight KV heads fill an H200 once with them
_MERGED_NUMBERS = 8192  # at once: 64 of each thread

# Triton uses them for the block table's entries, the keys and values that depend on those, and the arithmetic: with 5, two
# key tiles are in flight, in 38 KiB of shared memory; with 3 and 4, one.
NUM_STAGES = 5
BIASED_STAGES = 3  # with a bias of keys, whose cosines and sines are loaded ahead too, 8 bytes a number

# A program without work costs about a nanosecond, a missing one an idle processor: several for each of them.
_PROGRAMS_PER_PROCESSOR = 16

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

    Cost: one launch for each round of rows; scratch memory of 4 (E + 2) bytes per head and chunk that the block table
    has room for, at most MAX_CHUNKS; another launch if ``sequences`` has no ``arrivals_TK``.
    """
    query_start_B1, context_lens_B, block_table_BM, num_rows, arrivals_TK = sequences
    _, num_heads, head_dim = q_THE.shape
    _, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    width = padded(head_dim, 16)
    max_keys = block_table_BM.shape[1] * tokens_per_block
    max_chunks = min(-(-max_keys // CHUNK_KEYS), max(_FEW_CHUNKS, min(-(-max_keys // LONG_CHUNK_KEYS), MAX_CHUNKS)))
    row_bytes = 4 * num_heads * max_chunks * (head_dim + 2)
    rows_at_once = num_rows if max_chunks == 1 else min(num_rows, max(1, scratch_bytes // row_bytes))
    wanted = _PROGRAMS_PER_PROCESSOR * _num_processors(q_THE.device)
    sharing = min(max_chunks, -(-wanted // (rows_at_once * num_kv_heads)))
    places = rows_at_once * (max_chunks > 1), max_chunks, num_heads
    sum_TSHE, stat_TSH2 = (q_THE.new_empty((*places, size), dtype=torch.float32) for size in (head_dim, 2))
    if arrivals_TK is None:
        arrivals_TK = q_THE.new_zeros((places[0], num_kv_heads), dtype=torch.int32)
    per_kv_head = form.groups_of(q_THE, k_cache_NKPE).heads_per_kv_head
    merged_heads = min(16, padded(per_kv_head))
    merged = merged_heads, min(_FEW_CHUNKS, _MERGED_NUMBERS // (merged_heads * width))
    keys = keys_at_once(width, (q_THE if form.key_bias else k_cache_NKPE).dtype)
    num_stages = BIASED_STAGES if form.key_bias else NUM_STAGES
    shape = AttentionShape.of(q_THE, k_cache_NKPE, form, (padded(per_kv_head, 16), keys))
    inputs = q_THE, k_cache_NKPE, v_cache_NKPE, *(form.key_bias or 3 * [q_THE]), block_table_BM
    tensors = *inputs, out_THE, sum_TSHE, stat_TSH2, arrivals_TK
    lengths = query_start_B1, context_lens_B, len(context_lens_B)
    strides = block_table_BM.stride(0), *q_THE.stride()[:2], k_cache_NKPE.stride(0)
    constants = shape, (CHUNK_KEYS, LONG_CHUNK_KEYS, _FEW_CHUNKS, MAX_CHUNKS), merged, max_chunks > 1
    for first_row in range(0, num_rows, rows_at_once):
        num_programs = min(rows_at_once, num_rows - first_row) * num_kv_heads * sharing
        given = *tensors, *lengths, first_row, sharing, max_chunks, *strides, form.scale * LOG2_E, form.window
        launch(_attend_chunks, num_programs, q_THE.device, *given, *constants, num_stages=num_stages)


def keys_at_once(width: int, dtype: torch.dtype) -> int:
    """Return the keys of a key tile: 16 KiB of keys and values for heads padded to ``width`` numbers."""
    return min(64, max(16, 8192 // (width * dtype.itemsize)))


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
    arrivals,
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
    CHUNKS: tl.constexpr,
    MERGED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Attend chunks ``share``, ``share + sharing``, ... of one row and KV head, and as the last program merge them all.

    CHUNKS: CHUNK_KEYS and the three sizes after it. MERGED: heads, and chunks, merged at once. PARTIAL: there may be several.
    """
    wait_for_last()
    share = tl.program_id(0) % sharing
    kv_head = tl.program_id(0) // sharing % shape.kv_heads
    place = tl.program_id(0) // sharing // shape.kv_heads
    row = first_row + place
    seq = sequence_of(row, query_start, num_seqs, 0, 1, 0)
    num_keys = tl.load(context_lens + seq) - (tl.load(query_start + seq + 1) - row) + 1  # its own last

    row_R = tl.arange(0, shape.rows)
    first_head = kv_head * shape.per_kv_head - shape.skipped_heads
    head_R = first_head + row_R
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
    unseen = tl.where(window > 0, tl.maximum(num_keys - window, 0) // shape.keys * shape.keys, 0)  # whole tiles
    num_seen = num_keys - unseen
    grown = tl.minimum(tl.cdiv(num_seen, CHUNKS[0] * CHUNKS[2]), CHUNKS[1] // CHUNKS[0])
    length = CHUNKS[0] * tl.maximum(tl.maximum(grown, tl.cdiv(num_seen, CHUNKS[0] * CHUNKS[3])), 1)
    num_chunks = tl.maximum(tl.cdiv(num_seen, length), 1)
    first_place = place.to(tl.int64) * max_chunks * shape.heads
    out_row = raw(out) + row.to(tl.int64) * shape.heads * shape.head_dim
    for chunk in range(share, num_chunks, sharing):
        state = no_keys(shape)
        begin = unseen + chunk * length
        end = tl.minimum(begin + length, num_keys)
        for first in range(begin, end, shape.keys):
            places = blocks, head_place, scale_log2, first, end, position_R, window
            state = attend_keys(q_RE, state, caches, places, turning, shape, q.dtype.element_ty, False)
        maximum_R, total_R, sum_RE = state
        if PARTIAL and num_chunks > 1:
            scratch_R = first_place + chunk * shape.heads + head_R
            tl.store(sums + scratch_R[:, None] * shape.head_dim + dim_E[None, :], sum_RE, mask=kept_RE)
            tl.store(stats + scratch_R * 2, maximum_R, mask=kept_R)
            tl.store(stats + scratch_R * 2 + 1, total_R, mask=kept_R)
        else:
            _store_mixed(out_row, head_R, sum_RE, total_R, kept_RE, shape, out.dtype.element_ty)
    if PARTIAL and num_chunks > 1 and share < num_chunks:
        arrival = arrivals + place * shape.kv_heads + kv_head
        tl.debug_barrier()  # all threads have written their sums
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == tl.minimum(sharing, num_chunks) - 1:
            tl.store(arrival, 0)
            scratch = sums, stats, first_place, num_chunks
            for first in range(0, shape.per_kv_head, MERGED[0]):
                _merge_chunks(scratch, out_row, first_head, first, shape, MERGED, out.dtype.element_ty)


@triton.jit
def _merge_chunks(
    scratch, out_row, first_head, first_row, shape: tl.constexpr, MERGED: tl.constexpr, dtype: tl.constexpr
):
    """Merge the chunks of a few query heads of one row: rescale to the largest maximum, add in order, some at once."""
    sums, stats, first_place, num_chunks = scratch
    row_R = first_row + tl.arange(0, MERGED[0])
    head_R = first_head + row_R
    dim_E = tl.arange(0, shape.width)
    kept_R = (row_R < shape.per_kv_head) & (head_R >= 0) & (head_R < shape.heads)
    kept_RE = kept_R[:, None] & (dim_E < shape.head_dim)[None, :]
    maximum_R, total_R = tl.full(row_R.shape, LOWEST, tl.float32), tl.zeros(row_R.shape, tl.float32)
    sum_RE = tl.zeros(kept_RE.shape, tl.float32)
    for first in range(0, num_chunks, MERGED[1]):
        chunk_S = first + tl.arange(0, MERGED[1])
        there_SR = (chunk_S < num_chunks)[:, None] & kept_R[None, :]
        scratch_SR = first_place + (chunk_S * shape.heads)[:, None] + head_R[None, :]
        maximum_SR = tl.load(stats + scratch_SR * 2, mask=there_SR, other=LOWEST)
        total_SR = tl.load(stats + scratch_SR * 2 + 1, mask=there_SR, other=0.0)
        place_SRE = scratch_SR[:, :, None] * shape.head_dim + dim_E[None, None, :]
        kept_SRE = there_SR[:, :, None] & (dim_E < shape.head_dim)[None, None, :]
        sum_SRE = tl.load(sums + place_SRE, mask=kept_SRE, other=0.0)
        risen_R = tl.maximum(maximum_R, tl.max(maximum_SR, 0))
        shrink_R = tl.exp2(maximum_R - risen_R)
        weight_SR = tl.exp2(maximum_SR - risen_R[None, :])
        total_R = total_R * shrink_R + tl.sum(total_SR * weight_SR, 0)
        sum_RE = sum_RE * shrink_R[:, None] + tl.sum(sum_SRE * weight_SR[:, :, None], 0)
        maximum_R = risen_R
    _store_mixed(out_row, head_R, sum_RE, total_R, kept_RE, shape, dtype)


@triton.jit
def _store_mixed(out_row, head_R, sum_RE, total_R, kept_RE, shape: tl.constexpr, dtype: tl.constexpr):
    """Store the values' means; the sum of weights of a row without keys is 0, and its mean too."""
    mixed_RE = narrowed(sum_RE / tl.where(total_R == 0, 1.0, total_R)[:, None], dtype)
    place_RE = head_R[:, None] * shape.head_dim + tl.arange(0, shape.width)[None, :]
    tl.store(out_row + place_RE, mixed_RE, mask=kept_RE)
