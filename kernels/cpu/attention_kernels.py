"""Paged causal attention on CPU: numba kernels that read keys and values where they lie.

Work is cut into tiles: up to 96 query rows (some tokens of one sequence times the query heads of one KV head), so that
a key block is read and widened to float32 once for all of them. A tile walks its keys in blocks of 64 from position 0
with an online softmax:

    1. widen 64 keys, transpose them, scores = q @ k^T             (q was multiplied by scale * log2(e))
    2. new maximum; rescale what was summed by 2^(old - new); p = 2^(score - new)
    3. widen 64 values, sum += p @ v

On CPUs with AVX512-BF16 bfloat16 is not widened: two numbers are multiplied and added at once, neighbours in q and k, and
for the values those of two keys that follow each other. Scores are scaled after their product then, and p is rounded
to bfloat16 for the third step alone, as attention on GPUs does.

Which bits a row gets depends on its own sequence alone: key blocks always start at position 0 and are whole (absent
keys count as zeros), every sum runs in order of position, and a row's arithmetic is the same in every tile shape. A
chunked prompt, other sequences in the batch and the number of threads change nothing.

Knows addresses, not tensors; ``attention`` is the host that checks shapes and calls this.
"""

from tightwire.kernels.cpu.attention_block import (
    KEYS,
    MINUS_INFINITY,
    PAIRS,
    ROW_BYTES,
    TALL,
    VECTOR_BYTES,
    clear,
    copy,
    mix,
    narrow_quotient,
    pair_up,
    score,
    soften,
    widen,
)
from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import kernel
from tightwire.kernels.cpu.vector.numbers import size_of
from tightwire.kernels.cpu.vector.simd import BFLOAT16, LANES

# Most query rows per tile, unless one token alone has more heads per KV head. With 64 a prompt of 512 takes 1.05 to 1.1 times
# as long on a Zen 4, as each tile widens its keys and values anew; with 192 0.95, but many threads find too few tiles.
ROWS = 96


def scratch_floats(num_rows: int, head_dim: int) -> int:
    """Float32 numbers one thread needs: queries, sums, scores, maxima and sums of rows; widened keys and values."""
    padded = _padded(head_dim)
    per_row = 2 * padded + KEYS + 1 + LANES
    return (num_rows + TALL) * per_row + 2 * KEYS * padded + LANES * padded


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


@kernel
def attend(
    out: int,
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    q_kind: int,
    k_cache: int,
    v_cache: int,
    cache_block_stride: int,
    cache_kind: int,
    query_start: int,
    context_lens: int,
    block_table: int,
    table_stride: int,
    tokens_per_block: int,
    num_heads: int,
    num_kv_heads: int,
    heads_per_kv_head: int,
    skipped_heads: int,
    head_dim: int,
    scale_log2: float,
    tiles: int,
    num_tiles: int,
    counter: int,
    scratch: int,
    scratch_stride: int,
    thread: int,
) -> None:
    """Attend tile after tile until ``counter``, which other threads draw from too, has passed the last.

    Strides are bytes; ``out`` is contiguous, of q's kind; one KV head's tokens are contiguous inside a cache block.
    ``skipped_heads``: of the first KV head's query heads so many are not in q; of the last one's all behind q's end.
    ``scratch``: ``scratch_floats`` float32 numbers for each thread.
    """
    scratch += thread * scratch_stride
    padded = (head_dim + LANES - 1) // LANES * LANES
    in_pairs = PAIRS and q_kind == BFLOAT16 and cache_kind == BFLOAT16
    q_size = size_of(q_kind)
    token_bytes = head_dim * size_of(cache_kind)
    while True:
        item = simd.fetch_add(counter)
        if item >= num_tiles * num_kv_heads:
            return
        tile = tiles + 24 * (item // num_kv_heads)
        kv_head = item % num_kv_heads
        seq = simd.load_i64(tile)
        first_row = simd.load_i64(tile + 8)
        tokens = simd.load_i64(tile + 16)
        seq_end = simd.load_i32(query_start + 4 * seq + 4)
        first_position = simd.load_i32(context_lens + 4 * seq) - (seq_end - first_row)
        first_head = max(kv_head * heads_per_kv_head - skipped_heads, 0)
        heads = min((kv_head + 1) * heads_per_kv_head - skipped_heads, num_heads) - first_head
        rows = tokens * heads

        # One thread's scratch, in this order; rows are rounded up to whole tiles.
        row_room = rows + TALL
        queries = scratch
        sums = queries + 4 * padded * row_room
        scores = sums + 4 * padded * row_room
        lane_sums = scores + ROW_BYTES * row_room
        keys_t = lane_sums + VECTOR_BYTES * row_room
        values = keys_t + ROW_BYTES * padded
        wide = values + 4 * padded * KEYS
        maxima = wide + 4 * padded * LANES

        for row in range(row_room):
            target = queries + 4 * padded * row
            if row < rows:
                token = first_row + row // heads
                head = first_head + row % heads
                source = q + token * q_token_stride + head * q_head_stride
                if in_pairs:
                    copy(source, head_dim, padded, target)
                else:
                    widen(source, q_kind, head_dim, target)
                    for at in range(0, 4 * padded, VECTOR_BYTES):
                        simd.store(target + at, simd.mul(simd.load(target + at), simd.splat(scale_log2)))
            else:
                clear(target, padded)
            clear(sums + 4 * padded * row, padded)
            clear(lane_sums + VECTOR_BYTES * row, LANES)
            simd.store_scalar(maxima + 4 * row, MINUS_INFINITY)

        num_keys = first_position + tokens
        for first_key in range(0, num_keys, KEYS):
            index = first_key // tokens_per_block
            in_block = first_key % tokens_per_block
            for key in range(KEYS):
                key_row = wide + 4 * padded * (key % LANES)
                # In pairs both are narrow, and lie in one row until sixteen keys have come.
                value_row = key_row + 2 * padded if in_pairs else values + 4 * padded * key
                if first_key + key < num_keys:
                    offset = simd.load_i32(block_table + seq * table_stride + 4 * index) * cache_block_stride
                    offset += (kv_head * tokens_per_block + in_block) * token_bytes
                    if in_pairs:
                        copy(k_cache + offset, head_dim, padded, key_row)
                        copy(v_cache + offset, head_dim, padded, value_row)
                    else:
                        widen(k_cache + offset, cache_kind, head_dim, key_row)
                        widen(v_cache + offset, cache_kind, head_dim, value_row)
                    in_block += 1
                    if in_block == tokens_per_block:
                        in_block = 0
                        index += 1
                elif in_pairs:
                    clear(key_row, padded)
                else:
                    clear(key_row, padded)
                    clear(value_row, padded)
                if key % LANES == LANES - 1:
                    column = keys_t + 4 * (key - LANES + 1)
                    for at in range(0, padded // 2 if in_pairs else padded, LANES):
                        simd.transpose(wide + 4 * at, 4 * padded, column + ROW_BYTES * at, ROW_BYTES)
                    if in_pairs:
                        pair_up(wide + 2 * padded, padded, values + 4 * padded * (key // LANES * (LANES // 2)))
            score(scores, queries, keys_t, rows, padded, head_dim, in_pairs)
            for row in range(rows):
                visible = first_position + row // heads + 1 - first_key
                soften(
                    scores + ROW_BYTES * row,
                    sums + 4 * padded * row,
                    lane_sums + VECTOR_BYTES * row,
                    maxima + 4 * row,
                    visible,
                    padded,
                    scale_log2 if in_pairs else 1.0,
                    in_pairs,
                )
            mix(sums, scores, values, rows, padded, in_pairs)

        for row in range(rows):
            token = first_row + row // heads
            head = first_head + row % heads
            target = out + (token * num_heads + head) * head_dim * q_size
            total = simd.splat(simd.sum_lanes(simd.load(lane_sums + VECTOR_BYTES * row)))
            narrow_quotient(sums + 4 * padded * row, total, q_kind, head_dim, target)
