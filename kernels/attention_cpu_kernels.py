"""Paged causal attention on CPU: numba kernels that read keys and values where they lie.

Work is cut into tiles: up to 64 query rows (some tokens of one sequence times the query heads of one KV head), so that
a key block is read and widened to float32 once for all of them. A tile walks its keys in blocks of 64 from position 0
with an online softmax:

    1. widen 64 keys, transpose them, scores = q @ k^T             (q was multiplied by scale * log2(e))
    2. new maximum; rescale what was summed by 2^(old - new); p = 2^(score - new)
    3. widen 64 values, sum += p @ v

Which bits a row gets depends on its own sequence alone: key blocks always start at position 0 and are whole (absent
keys count as zeros), every sum runs in order of position, and a row's arithmetic is the same in every tile shape. A
chunked prompt, other sequences in the batch and the number of threads change nothing.

Knows addresses, not tensors; ``attention`` is the host that checks shapes and calls this.
"""

import math

from tightwire.kernels import simd
from tightwire.kernels.jit import helper, kernel
from tightwire.kernels.numbers import load_numbers, size_of, store_numbers
from tightwire.kernels.simd import LANES

KEYS = 64  # keys per block: four vectors of scores per row
ROWS = 64  # most query rows per tile, unless one token alone has more heads per KV head

_ROW_BYTES = 4 * KEYS
_VECTOR_BYTES = 4 * LANES
BUCKETS = 64  # counters for sorting tiles by cost
_MINUS_INFINITY = -math.inf

_scores_4 = simd.make_tile_product(4, 4, accumulate=False)
_scores_2 = simd.make_tile_product(2, 4, accumulate=False)
_scores_1 = simd.make_tile_product(1, 4, accumulate=False)
_values_4 = simd.make_tile_product(4, 4, accumulate=True)
_values_2 = simd.make_tile_product(2, 4, accumulate=True)
_values_1 = simd.make_tile_product(1, 4, accumulate=True)
_values_4_narrow = simd.make_tile_product(4, 1, accumulate=True)
_values_2_narrow = simd.make_tile_product(2, 1, accumulate=True)
_values_1_narrow = simd.make_tile_product(1, 1, accumulate=True)


def scratch_floats(num_rows: int, head_dim: int) -> int:
    """Float32 numbers one thread needs: queries, sums, scores, maxima and sums of rows; widened keys and values."""
    padded = _padded(head_dim)
    per_row = 2 * padded + KEYS + 1 + LANES
    return (num_rows + 4) * per_row + 2 * KEYS * padded + LANES * padded


def _padded(head_dim: int) -> int:
    return -(-head_dim // LANES) * LANES


# --- writing --------------------------------------------------------------------------------------------------------


@kernel
def write_slots(
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    v: int,
    v_token_stride: int,
    v_head_stride: int,
    k_cache: int,
    v_cache: int,
    cache_block_stride: int,
    slots: int,
    num_tokens: int,
    num_blocks: int,
    num_kv_heads: int,
    tokens_per_block: int,
    head_bytes: int,
) -> int:
    """Copy each token's heads to its slot; returns minus one, or the first token whose slot is not in the cache."""
    for token in range(num_tokens):
        slot = simd.load_i32(slots + 4 * token)
        if slot < 0 or slot >= num_blocks * tokens_per_block:
            return token
        block = slot // tokens_per_block
        target = block * cache_block_stride + (slot - block * tokens_per_block) * head_bytes
        for head in range(num_kv_heads):
            place = target + head * tokens_per_block * head_bytes
            simd.copy_bytes(k_cache + place, k + token * k_token_stride + head * k_head_stride, head_bytes)
            simd.copy_bytes(v_cache + place, v + token * v_token_stride + head * v_head_stride, head_bytes)
    return -1


# --- planning -------------------------------------------------------------------------------------------------------


@kernel
def plan_tiles(
    query_start: int,
    context_lens: int,
    num_seqs: int,
    num_tokens: int,
    block_table: int,
    table_stride: int,
    max_blocks: int,
    num_blocks: int,
    tokens_per_block: int,
    tile_tokens: int,
    work: int,
) -> tuple[int, int]:
    """Cut the batch into tiles, costliest first, so that threads finish together.

    ``work`` is int64: 64 counters for sorting, then three numbers per tile: sequence, first row of the packed queries,
    tokens. The first counter ends as 0, for threads to draw tiles from. Strides are bytes.

    Returns:
        Number of tiles and number of keys they visit in all; or minus one and the first sequence whose lengths or
        blocks cannot be right (``num_seqs``: the queries do not cover the packed rows).
    """
    for bucket in range(BUCKETS):
        simd.store_i64(work + 8 * bucket, 0)
    keys_in_all = 0
    for seq in range(num_seqs):
        start = simd.load_i32(query_start + 4 * seq)
        query_len = simd.load_i32(query_start + 4 * seq + 4) - start
        context_len = simd.load_i32(context_lens + 4 * seq)
        used_blocks = (context_len + tokens_per_block - 1) // tokens_per_block
        if start < 0 or query_len < 0 or context_len < query_len or used_blocks > max_blocks:
            return -1, seq
        for index in range(used_blocks):
            block = simd.load_i32(block_table + seq * table_stride + 4 * index)
            if block < 0 or block >= num_blocks:
                return -1, seq
        for first in range(0, query_len, tile_tokens):
            keys = context_len - query_len + min(first + tile_tokens, query_len)
            counter = work + 8 * _bucket(keys)
            simd.store_i64(counter, simd.load_i64(counter) + 1)
            keys_in_all += keys
    if simd.load_i32(query_start) != 0 or simd.load_i32(query_start + 4 * num_seqs) != num_tokens:
        return -1, num_seqs
    num_tiles = 0
    for bucket in range(BUCKETS):
        in_bucket = simd.load_i64(work + 8 * bucket)
        simd.store_i64(work + 8 * bucket, num_tiles)
        num_tiles += in_bucket
    for seq in range(num_seqs):
        start = simd.load_i32(query_start + 4 * seq)
        query_len = simd.load_i32(query_start + 4 * seq + 4) - start
        context_len = simd.load_i32(context_lens + 4 * seq)
        for first in range(0, query_len, tile_tokens):
            tokens = min(tile_tokens, query_len - first)
            counter = work + 8 * _bucket(context_len - query_len + first + tokens)
            place = simd.load_i64(counter)
            simd.store_i64(counter, place + 1)
            tile = work + 8 * (BUCKETS + 3 * place)
            simd.store_i64(tile, seq)
            simd.store_i64(tile + 8, start + first)
            simd.store_i64(tile + 16, tokens)
    simd.store_i64(work, 0)
    return num_tiles, keys_in_all


def work_numbers(num_tokens: int, num_seqs: int, tile_tokens: int) -> int:
    """Int64 numbers that ``plan_tiles`` may write."""
    return BUCKETS + 3 * (num_tokens // tile_tokens + num_seqs)


@helper
def _bucket(keys: int) -> int:
    """The more keys, the smaller; tiles within a factor of two of each other share a bucket."""
    bucket = BUCKETS - 1
    while keys > 1:
        keys >>= 1
        bucket -= 1
    return bucket


# --- attention ------------------------------------------------------------------------------------------------------


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
    num_kv_heads: int,
    heads_per_kv_head: int,
    head_dim: int,
    scale_log2: float,
    tiles: int,
    num_tiles: int,
    counter: int,
    scratch: int,
) -> None:
    """Attend tile after tile until ``counter``, which other threads draw from too, has passed the last.

    Strides are bytes; ``out`` is contiguous, of q's kind; one KV head's tokens are contiguous inside a cache block.
    """
    padded = (head_dim + LANES - 1) // LANES * LANES
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
        rows = tokens * heads_per_kv_head
        first_head = kv_head * heads_per_kv_head

        # One thread's scratch, in this order; rows are rounded up to whole tiles of four.
        row_room = rows + 4
        queries = scratch
        sums = queries + 4 * padded * row_room
        scores = sums + 4 * padded * row_room
        lane_sums = scores + _ROW_BYTES * row_room
        keys_t = lane_sums + _VECTOR_BYTES * row_room
        values = keys_t + _ROW_BYTES * padded
        wide = values + 4 * padded * KEYS
        maxima = wide + 4 * padded * LANES

        for row in range(row_room):
            target = queries + 4 * padded * row
            if row < rows:
                token = first_row + row // heads_per_kv_head
                head = first_head + row % heads_per_kv_head
                _widen(q + token * q_token_stride + head * q_head_stride, q_kind, head_dim, target)
                for at in range(0, 4 * padded, _VECTOR_BYTES):
                    simd.store(target + at, simd.mul(simd.load(target + at), simd.splat(scale_log2)))
            else:
                _clear(target, padded)
            _clear(sums + 4 * padded * row, padded)
            _clear(lane_sums + _VECTOR_BYTES * row, LANES)
            simd.store_scalar(maxima + 4 * row, _MINUS_INFINITY)

        num_keys = first_position + tokens
        for first_key in range(0, num_keys, KEYS):
            index = first_key // tokens_per_block
            in_block = first_key % tokens_per_block
            for key in range(KEYS):
                key_row = wide + 4 * padded * (key % LANES)
                value_row = values + 4 * padded * key
                if first_key + key < num_keys:
                    offset = simd.load_i32(block_table + seq * table_stride + 4 * index) * cache_block_stride
                    offset += (kv_head * tokens_per_block + in_block) * token_bytes
                    _widen(k_cache + offset, cache_kind, head_dim, key_row)
                    _widen(v_cache + offset, cache_kind, head_dim, value_row)
                    in_block += 1
                    if in_block == tokens_per_block:
                        in_block = 0
                        index += 1
                else:
                    _clear(key_row, padded)
                    _clear(value_row, padded)
                if key % LANES == LANES - 1:
                    column = keys_t + 4 * (key - LANES + 1)
                    for at in range(0, padded, LANES):
                        simd.transpose(wide + 4 * at, 4 * padded, column + _ROW_BYTES * at, _ROW_BYTES)
            _score(scores, queries, keys_t, rows, head_dim, padded)
            for row in range(rows):
                visible = first_position + row // heads_per_kv_head + 1 - first_key
                _soften(
                    scores + _ROW_BYTES * row,
                    sums + 4 * padded * row,
                    lane_sums + _VECTOR_BYTES * row,
                    maxima + 4 * row,
                    visible,
                    padded,
                )
            _mix(sums, scores, values, rows, padded)

        for row in range(rows):
            token = first_row + row // heads_per_kv_head
            head = first_head + row % heads_per_kv_head
            target = out + (token * num_kv_heads * heads_per_kv_head + head) * head_dim * q_size
            total = simd.splat(simd.sum_lanes(simd.load(lane_sums + _VECTOR_BYTES * row)))
            _narrow_quotient(sums + 4 * padded * row, total, q_kind, head_dim, target)


@helper
def _widen(source: int, kind: int, count: int, target: int) -> None:
    """``count`` numbers of ``kind`` become float32; ``target`` has room for whole vectors."""
    size = size_of(kind)
    for at in range(0, count, LANES):
        simd.store(target + 4 * at, load_numbers(source + size * at, kind, count - at))


@helper
def _narrow_quotient(source: int, divisor: simd.Vector, kind: int, count: int, target: int) -> None:
    """``source / divisor``, rounded once to ``kind``."""
    size = size_of(kind)
    for at in range(0, count, LANES):
        store_numbers(target + size * at, simd.div(simd.load(source + 4 * at), divisor), kind, count - at)


@helper
def _clear(address: int, count: int) -> None:
    for at in range(0, 4 * count, _VECTOR_BYTES):
        simd.store(address + at, simd.splat(0.0))


@helper
def _score(scores: int, queries: int, keys_t: int, rows: int, head_dim: int, padded: int) -> None:
    """scores (rows, 64) = queries @ keys^T."""
    stride = 4 * padded
    if rows == 1:
        _scores_1(scores, _ROW_BYTES, queries, stride, keys_t, _ROW_BYTES, head_dim)
    elif rows == 2:
        _scores_2(scores, _ROW_BYTES, queries, stride, keys_t, _ROW_BYTES, head_dim)
    else:
        for row in range(0, rows, 4):
            c = scores + _ROW_BYTES * row
            _scores_4(c, _ROW_BYTES, queries + stride * row, stride, keys_t, _ROW_BYTES, head_dim)


@helper
def _mix(sums: int, weights: int, values: int, rows: int, padded: int) -> None:
    """sums (rows, padded) += weights (rows, 64) @ values."""
    stride = 4 * padded
    wide_columns = padded // KEYS * KEYS
    for column in range(0, wide_columns, 4 * LANES):
        c = sums + 4 * column
        v = values + 4 * column
        if rows == 1:
            _values_1(c, stride, weights, _ROW_BYTES, v, stride, KEYS)
        elif rows == 2:
            _values_2(c, stride, weights, _ROW_BYTES, v, stride, KEYS)
        else:
            for row in range(0, rows, 4):
                _values_4(c + stride * row, stride, weights + _ROW_BYTES * row, _ROW_BYTES, v, stride, KEYS)
    for column in range(wide_columns, padded, LANES):
        c = sums + 4 * column
        v = values + 4 * column
        if rows == 1:
            _values_1_narrow(c, stride, weights, _ROW_BYTES, v, stride, KEYS)
        elif rows == 2:
            _values_2_narrow(c, stride, weights, _ROW_BYTES, v, stride, KEYS)
        else:
            for row in range(0, rows, 4):
                _values_4_narrow(c + stride * row, stride, weights + _ROW_BYTES * row, _ROW_BYTES, v, stride, KEYS)


@helper
def _soften(scores: int, sums: int, lane_sums: int, maximum: int, visible: int, padded: int) -> None:
    """One row's step of the online softmax over 64 scores, of which the first ``visible`` count; p replaces them."""
    if visible <= 0:
        _clear(scores, KEYS)
        return
    s0 = simd.load(scores)
    s1 = simd.load(scores + _VECTOR_BYTES)
    s2 = simd.load(scores + 2 * _VECTOR_BYTES)
    s3 = simd.load(scores + 3 * _VECTOR_BYTES)
    if visible < KEYS:
        s0 = simd.keep_first(s0, visible, _MINUS_INFINITY)
        s1 = simd.keep_first(s1, visible - LANES, _MINUS_INFINITY)
        s2 = simd.keep_first(s2, visible - 2 * LANES, _MINUS_INFINITY)
        s3 = simd.keep_first(s3, visible - 3 * LANES, _MINUS_INFINITY)
    old = simd.splat(simd.load_scalar(maximum))
    highest = simd.maximum(simd.maximum(s0, s1), simd.maximum(s2, s3))
    new = simd.maximum(old, simd.splat(simd.max_lanes(highest)))
    shrink = simd.exp2(simd.sub(old, new))
    simd.store_scalar(maximum, simd.max_lanes(new))
    p0 = simd.exp2(simd.sub(s0, new))
    p1 = simd.exp2(simd.sub(s1, new))
    p2 = simd.exp2(simd.sub(s2, new))
    p3 = simd.exp2(simd.sub(s3, new))
    simd.store(scores, p0)
    simd.store(scores + _VECTOR_BYTES, p1)
    simd.store(scores + 2 * _VECTOR_BYTES, p2)
    simd.store(scores + 3 * _VECTOR_BYTES, p3)
    total = simd.add(simd.add(p0, p1), simd.add(p2, p3))
    simd.store(lane_sums, simd.fma(simd.load(lane_sums), shrink, total))
    if simd.max_lanes(shrink) != 1.0:
        for at in range(0, 4 * padded, _VECTOR_BYTES):
            simd.store(sums + at, simd.mul(simd.load(sums + at), shrink))
