"""Paged causal attention on CPU: numba kernels that read keys and values where they lie.

Work is cut into tiles: up to 64 query rows (some tokens of one sequence times the query heads of one KV head), so that
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

import math
from typing import Any

from tightwire.kernels import simd
from tightwire.kernels.jit import helper, kernel, routine
from tightwire.kernels.numbers import load_numbers, size_of, store_numbers
from tightwire.kernels.simd import BFLOAT16, LANES

KEYS = 64  # keys per block: four vectors of scores per row
ROWS = 64  # most query rows per tile, unless one token alone has more heads per KV head

_ROW_BYTES = 4 * KEYS
_VECTOR_BYTES = 4 * LANES
_MINUS_INFINITY = -math.inf
_PAIRS = simd.bf16_products_usable()

# Tiles whose sums stay in registers: of sixteen floats and 32 of them with AVX-512; else eight and 16 (AVX2).
_WIDE = simd.has_wide_registers()
_TALL = 4 if _WIDE else 6  # rows of a tile when there are that many, else four, two or one
_VECTORS = {1: 4, 2: 4, 4: 4} if _WIDE else {1: 4, 2: 2, 4: 1, 6: 1}  # of sixteen columns, by rows


def _make_products(columns: int, *, accumulate: bool, pairs: bool = False) -> Any:
    """A routine for ``c = a @ b`` or ``c += a @ b``, of ``columns`` columns and any number of rows."""
    tiles = {
        rows: simd.make_tile_product(rows, min(vectors, columns // LANES), accumulate=accumulate, pairs=pairs)
        for rows, vectors in _VECTORS.items()
    }
    one, two, four, tall = tiles[1], tiles[2], tiles[4], tiles[_TALL]
    step_1, step_2, step_4, step = (LANES * min(_VECTORS[rows], columns // LANES) for rows in (1, 2, 4, _TALL))

    @routine
    def product(c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int, rows: int, depth: int) -> None:
        if rows == 1:
            for at in range(0, 4 * columns, 4 * step_1):
                one(c + at, c_stride, a, a_stride, b + at, b_stride, depth)
        elif rows == 2:
            for at in range(0, 4 * columns, 4 * step_2):
                two(c + at, c_stride, a, a_stride, b + at, b_stride, depth)
        elif rows <= 4:
            for at in range(0, 4 * columns, 4 * step_4):
                four(c + at, c_stride, a, a_stride, b + at, b_stride, depth)
        else:
            for at in range(0, 4 * columns, 4 * step):
                for row in range(0, rows, _TALL):
                    tall(c + c_stride * row + at, c_stride, a + a_stride * row, a_stride, b + at, b_stride, depth)

    return product


_scores = _make_products(KEYS, accumulate=False)
_values = _make_products(KEYS, accumulate=True)
_values_narrow = _make_products(LANES, accumulate=True)
_pair_scores = _make_products(KEYS, accumulate=False, pairs=_PAIRS)
_pair_values = _make_products(KEYS, accumulate=True, pairs=_PAIRS)
_pair_values_narrow = _make_products(LANES, accumulate=True, pairs=_PAIRS)


_store_narrow = simd.store_rounded if _PAIRS else simd.store_bf16


def scratch_floats(num_rows: int, head_dim: int) -> int:
    """Float32 numbers one thread needs: queries, sums, scores, maxima and sums of rows; widened keys and values."""
    padded = _padded(head_dim)
    per_row = 2 * padded + KEYS + 1 + LANES
    return (num_rows + _TALL) * per_row + 2 * KEYS * padded + LANES * padded


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
    in_pairs = _PAIRS and q_kind == BFLOAT16 and cache_kind == BFLOAT16
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
        row_room = rows + _TALL
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
                token = first_row + row // heads
                head = first_head + row % heads
                source = q + token * q_token_stride + head * q_head_stride
                if in_pairs:
                    _copy(source, head_dim, padded, target)
                else:
                    _widen(source, q_kind, head_dim, target)
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
                # In pairs both are narrow, and lie in one row until sixteen keys have come.
                value_row = key_row + 2 * padded if in_pairs else values + 4 * padded * key
                if first_key + key < num_keys:
                    offset = simd.load_i32(block_table + seq * table_stride + 4 * index) * cache_block_stride
                    offset += (kv_head * tokens_per_block + in_block) * token_bytes
                    if in_pairs:
                        _copy(k_cache + offset, head_dim, padded, key_row)
                        _copy(v_cache + offset, head_dim, padded, value_row)
                    else:
                        _widen(k_cache + offset, cache_kind, head_dim, key_row)
                        _widen(v_cache + offset, cache_kind, head_dim, value_row)
                    in_block += 1
                    if in_block == tokens_per_block:
                        in_block = 0
                        index += 1
                elif in_pairs:
                    _clear(key_row, padded)
                else:
                    _clear(key_row, padded)
                    _clear(value_row, padded)
                if key % LANES == LANES - 1:
                    column = keys_t + 4 * (key - LANES + 1)
                    for at in range(0, padded // 2 if in_pairs else padded, LANES):
                        simd.transpose(wide + 4 * at, 4 * padded, column + _ROW_BYTES * at, _ROW_BYTES)
                    if in_pairs:
                        _pair_up(wide + 2 * padded, padded, values + 4 * padded * (key // LANES * (LANES // 2)))
            if in_pairs:
                _pair_scores(scores, _ROW_BYTES, queries, 4 * padded, keys_t, _ROW_BYTES, rows, padded // 2)
            else:
                _scores(scores, _ROW_BYTES, queries, 4 * padded, keys_t, _ROW_BYTES, rows, head_dim)
            for row in range(rows):
                visible = first_position + row // heads + 1 - first_key
                _soften(
                    scores + _ROW_BYTES * row,
                    sums + 4 * padded * row,
                    lane_sums + _VECTOR_BYTES * row,
                    maxima + 4 * row,
                    visible,
                    padded,
                    scale_log2 if in_pairs else 1.0,
                    in_pairs,
                )
            _mix(sums, scores, values, rows, padded, in_pairs)

        for row in range(rows):
            token = first_row + row // heads
            head = first_head + row % heads
            target = out + (token * num_heads + head) * head_dim * q_size
            total = simd.splat(simd.sum_lanes(simd.load(lane_sums + _VECTOR_BYTES * row)))
            _narrow_quotient(sums + 4 * padded * row, total, q_kind, head_dim, target)


@helper
def _widen(source: int, kind: int, count: int, target: int) -> None:
    """``count`` numbers of ``kind`` become float32; ``target`` has room for whole vectors."""
    size = size_of(kind)
    for at in range(0, count, LANES):
        simd.store(target + 4 * at, load_numbers(source + size * at, kind, count - at))


@helper
def _copy(source: int, count: int, padded: int, target: int) -> None:
    """``count`` 16-bit numbers, and zeros up to ``padded``."""
    whole = count // (2 * LANES) * (2 * LANES)
    for at in range(0, whole, 2 * LANES):
        simd.store(target + 2 * at, simd.load(source + 2 * at))
    if whole < count:
        for at in range(2 * whole, 2 * padded, 8):
            simd.store_i64(target + at, 0)
        simd.copy_bytes(target + 2 * whole, source + 2 * whole, 2 * (count - whole))


@helper
def _pair_up(rows: int, padded: int, target: int) -> None:
    """Eight rows of pairs from sixteen of 16-bit numbers, each with the one that follows it; all strides 4 * padded."""
    stride = 4 * padded
    for row in range(0, LANES, 2):
        source = rows + stride * row
        for at in range(0, padded, LANES):
            simd.interleave(source + 2 * at, source + stride + 2 * at, target + stride * (row // 2) + 4 * at)


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
def _mix(sums: int, weights: int, values: int, rows: int, padded: int, in_pairs: bool) -> None:
    """sums (rows, padded) += weights (rows, 64) @ values."""
    stride = 4 * padded
    wide_columns = padded // KEYS * KEYS
    for column in range(0, wide_columns, KEYS):
        if in_pairs:
            _pair_values(sums + 4 * column, stride, weights, _ROW_BYTES, values + 4 * column, stride, rows, KEYS // 2)
        else:
            _values(sums + 4 * column, stride, weights, _ROW_BYTES, values + 4 * column, stride, rows, KEYS)
    for column in range(wide_columns, padded, LANES):
        at, b = sums + 4 * column, values + 4 * column
        if in_pairs:
            _pair_values_narrow(at, stride, weights, _ROW_BYTES, b, stride, rows, KEYS // 2)
        else:
            _values_narrow(at, stride, weights, _ROW_BYTES, b, stride, rows, KEYS)


@helper
def _soften(
    scores: int,
    sums: int,
    lane_sums: int,
    maximum: int,
    visible: int,
    padded: int,
    scale: float,
    in_pairs: bool,
) -> None:
    """One row's step of the online softmax over 64 scores, of which the first ``visible`` count; p replaces them.

    ``in_pairs``: p is stored in bfloat16, in the first half of the row.
    """
    if visible <= 0:
        _clear(scores, KEYS)
        return
    s0 = simd.load(scores)
    s1 = simd.load(scores + _VECTOR_BYTES)
    s2 = simd.load(scores + 2 * _VECTOR_BYTES)
    s3 = simd.load(scores + 3 * _VECTOR_BYTES)
    if in_pairs:
        factor = simd.splat(scale)
        s0, s1, s2, s3 = simd.mul(s0, factor), simd.mul(s1, factor), simd.mul(s2, factor), simd.mul(s3, factor)
    if visible < KEYS:
        s0 = simd.keep_first(s0, visible, _MINUS_INFINITY)
        s1 = simd.keep_first(s1, visible - LANES, _MINUS_INFINITY)
        s2 = simd.keep_first(s2, visible - 2 * LANES, _MINUS_INFINITY)
        s3 = simd.keep_first(s3, visible - 3 * LANES, _MINUS_INFINITY)
    old = simd.load_scalar(maximum)
    highest = simd.max_lanes(simd.maximum(simd.maximum(s0, s1), simd.maximum(s2, s3)))
    new, shrink = simd.splat(old), simd.splat(1.0)
    if not highest <= old:  # rarely, behind the first blocks; a NaN goes on
        new = simd.splat(highest)
        shrink = simd.exp2(simd.sub(simd.splat(old), new))
        simd.store_scalar(maximum, highest)
        for at in range(0, 4 * padded, _VECTOR_BYTES):
            simd.store(sums + at, simd.mul(simd.load(sums + at), shrink))
    p0 = simd.exp2(simd.sub(s0, new))
    p1 = simd.exp2(simd.sub(s1, new))
    p2 = simd.exp2(simd.sub(s2, new))
    p3 = simd.exp2(simd.sub(s3, new))
    if in_pairs:
        _store_narrow(scores, p0)
        _store_narrow(scores + _VECTOR_BYTES // 2, p1)
        _store_narrow(scores + _VECTOR_BYTES, p2)
        _store_narrow(scores + 3 * _VECTOR_BYTES // 2, p3)
    else:
        simd.store(scores, p0)
        simd.store(scores + _VECTOR_BYTES, p1)
        simd.store(scores + 2 * _VECTOR_BYTES, p2)
        simd.store(scores + 3 * _VECTOR_BYTES, p3)
    total = simd.add(simd.add(p0, p1), simd.add(p2, p3))
    simd.store(lane_sums, simd.fma(simd.load(lane_sums), shrink, total))
