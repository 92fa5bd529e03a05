"""Cutting a batch into the tiles that ``attention_cpu_kernels`` works on, costliest first."""

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import helper, kernel

BUCKETS = 64  # counters for sorting tiles by cost


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
