"""Host side of the CPU attention: checks, scratch memory and threads around ``attention_cpu_kernels``."""

import math

import torch
from torch import Tensor

from tightwire.kernels import attention_cpu_kernels
from tightwire.kernels.simd import NUMBER_KIND
from tightwire.kernels.threads import run_on_threads

_LOG2_E = 1 / math.log(2)

# One thread does this many score and value multiplications in about 100 us; waking a helper for less costs more.
_WORK_PER_THREAD = 8_000_000


def paged_attention_cpu(
    q_THE: Tensor,
    k_cache_NKPE: Tensor,
    v_cache_NKPE: Tensor,
    query_start_B1: Tensor,
    context_lens_B: Tensor,
    block_table_BM: Tensor,
    scale: float,
) -> Tensor:
    num_tokens, num_heads, head_dim = q_THE.shape
    num_blocks, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    num_seqs, max_blocks = block_table_BM.shape
    _check_attention(q_THE, k_cache_NKPE, v_cache_NKPE, query_start_B1, context_lens_B, block_table_BM)
    out_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=q_THE.dtype)
    per_kv_head = num_heads // num_kv_heads
    tile_tokens = max(1, attention_cpu_kernels.ROWS // per_kv_head)
    work = torch.empty(attention_cpu_kernels.work_numbers(num_tokens, num_seqs, tile_tokens), dtype=torch.int64)
    table_stride = block_table_BM.stride(0) * 4
    num_tiles, num_keys = attention_cpu_kernels.plan_tiles(
        query_start_B1.data_ptr(),
        context_lens_B.data_ptr(),
        num_seqs,
        num_tokens,
        block_table_BM.data_ptr(),
        table_stride,
        max_blocks,
        num_blocks,
        tokens_per_block,
        tile_tokens,
        work.data_ptr(),
    )
    if num_tiles < 0:
        raise ValueError(
            _impossible(num_keys, num_tokens, query_start_B1, context_lens_B, block_table_BM, k_cache_NKPE)
        )
    work[0] = 0  # the counter that threads draw tiles from; its place is free once the tiles are planned
    arguments = (
        out_THE.data_ptr(),
        q_THE.data_ptr(),
        q_THE.stride(0) * q_THE.element_size(),
        q_THE.stride(1) * q_THE.element_size(),
        NUMBER_KIND[q_THE.dtype],
        k_cache_NKPE.data_ptr(),
        v_cache_NKPE.data_ptr(),
        k_cache_NKPE.stride(0) * k_cache_NKPE.element_size(),
        NUMBER_KIND[k_cache_NKPE.dtype],
        query_start_B1.data_ptr(),
        context_lens_B.data_ptr(),
        block_table_BM.data_ptr(),
        table_stride,
        tokens_per_block,
        num_kv_heads,
        per_kv_head,
        head_dim,
        scale * _LOG2_E,
        work.data_ptr() + 8 * attention_cpu_kernels.BUCKETS,
        num_tiles,
        work.data_ptr(),
    )
    num_scratch = attention_cpu_kernels.scratch_floats(min(tile_tokens, num_tokens) * per_kv_head, head_dim)

    def attend() -> None:
        scratch = torch.empty(num_scratch)
        attention_cpu_kernels.attend(*arguments, scratch.data_ptr())

    widened = num_keys * num_kv_heads * head_dim * (8 + min(tile_tokens, num_tokens) * per_kv_head)
    run_on_threads(attend, min(num_tiles * num_kv_heads, 1 + widened // _WORK_PER_THREAD))
    return out_THE


def _check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, lens: Tensor, table: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
    if q.shape[1] % k_cache.shape[1] or q.shape[2] != k_cache.shape[3] or k_cache.shape != v_cache.shape:
        raise ValueError(f"attention wants q (T, H, E), caches (N, K, P, E) and H a multiple of K; got {shapes}")
    if q.dtype not in NUMBER_KIND or k_cache.dtype not in NUMBER_KIND or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"attention knows {', '.join(map(str, NUMBER_KIND))}; "
            f"got q {q.dtype}, caches {k_cache.dtype} and {v_cache.dtype}"
        )
    if q.stride(2) != 1 or not (k_cache[0].is_contiguous() and v_cache[0].is_contiguous()):
        raise ValueError(f"attention wants each head's numbers contiguous, and each cache block; got {shapes}")
    if k_cache.stride(0) != v_cache.stride(0):
        raise ValueError("attention wants the same stride between blocks in both caches")
    num_seqs = table.shape[0]
    if start.shape != (num_seqs + 1,) or lens.shape != (num_seqs,):
        raise ValueError(
            f"for {num_seqs} rows of the block table attention wants {num_seqs + 1} query starts and {num_seqs} "
            f"context lengths; got {tuple(start.shape)} and {tuple(lens.shape)}"
        )
    for index in (start, lens, table):
        if index.dtype != torch.int32 or index.device.type != "cpu" or (index.numel() and index.stride(-1) != 1):
            raise ValueError(f"attention wants int32 index tensors on q's device, contiguous; got {index.dtype}")


def _impossible(seq: int, num_tokens: int, start: Tensor, lens: Tensor, table: Tensor, k_cache: Tensor) -> str:
    num_blocks, _, tokens_per_block, _ = k_cache.shape
    if seq == len(lens):
        return f"query starts end at {int(start[-1])}, but q has {num_tokens} rows"
    return (
        f"sequence {seq} has query rows {int(start[seq])} to {int(start[seq + 1])} of {num_tokens}, a context of "
        f"{int(lens[seq])} tokens and the blocks {table[seq].tolist()}; the queries must be the context's last tokens, "
        f"and every {tokens_per_block} tokens of context need a block of the {num_blocks} there are"
    )
