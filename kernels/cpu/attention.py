"""Host side of the CPU attention: checks, scratch memory and threads around ``attention_cpu_kernels``."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tightwire.kernels.cpu.attention_kernels import ROWS, attend, scratch_floats
from tightwire.kernels.cpu.attention_plan import BUCKETS, plan_tiles, work_numbers
from tightwire.kernels.cpu.vector.simd import NUMBER_KIND
from tightwire.kernels.cpu.vector.threads import run_on_threads
from tightwire.kernels.spec.attention import HeadGroups, check_attention, even_groups

LOG2_E = 1 / math.log(2)

# One thread does this many score and value multiplications in about 100 us; waking a helper for less costs more.
_WORK_PER_THREAD = 4_000_000


def paged_attention_cpu(
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
    """``attention.paged_attention`` for CPU tensors; see there. Generated rows and prompts go through the same kernel.

    Cost: about 12 us of Python per call, then the kernels.
    """
    groups = groups or even_groups(q_THE, k_cache_NKPE)
    check_attention(q_THE, k_cache_NKPE, v_cache_NKPE, query_start_B1, context_lens_B, block_table_BM, groups)
    num_tokens, num_heads, head_dim = q_THE.shape
    num_blocks, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    tile_tokens = max(1, ROWS // groups.heads_per_kv_head)
    tiles = cut_into_tiles(
        query_start_B1, context_lens_B, block_table_BM, num_tokens, tile_tokens, num_blocks, tokens_per_block
    )
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype)
    rows = min(tile_tokens, num_tokens) * groups.heads_per_kv_head
    multiplications = tiles.num_keys * num_kv_heads * head_dim * (8 + rows)
    max_threads = min(tiles.num_tiles * num_kv_heads, 1 + multiplications // _WORK_PER_THREAD, torch.get_num_threads())
    scratch = torch.empty(max_threads, scratch_floats(rows, head_dim), dtype=torch.float32)
    token_stride, head_stride, _ = q_THE.stride()
    q_bytes = q_THE.element_size()
    arguments = (
        out_THE.data_ptr(),
        q_THE.data_ptr(),
        token_stride * q_bytes,
        head_stride * q_bytes,
        NUMBER_KIND[q_THE.dtype],
        k_cache_NKPE.data_ptr(),
        v_cache_NKPE.data_ptr(),
        k_cache_NKPE.stride(0) * k_cache_NKPE.element_size(),
        NUMBER_KIND[k_cache_NKPE.dtype],
        query_start_B1.data_ptr(),
        context_lens_B.data_ptr(),
        block_table_BM.data_ptr(),
        block_table_BM.stride(0) * 4,
        tokens_per_block,
        num_heads,
        num_kv_heads,
        groups.heads_per_kv_head,
        groups.skipped_heads,
        head_dim,
        scale * LOG2_E,
        tiles.address,
        tiles.num_tiles,
        tiles.counter,
        scratch.data_ptr(),
        scratch.stride(0) * 4,
    )
    run_on_threads(attend, arguments, len(scratch))
    return out_THE


class Tiles(NamedTuple):
    """A batch cut up for ``attend``, which is to be given ``address``, ``num_tiles`` and a counter at zero."""

    work_W: Tensor
    num_tiles: int
    num_keys: int  # that the tiles visit in all

    @property
    def address(self) -> int:
        return self.work_W.data_ptr() + 8 * BUCKETS

    @property
    def counter(self) -> int:
        """A counter at zero, for one use."""
        return self.work_W.data_ptr()


def cut_into_tiles(
    query_start_B1: Tensor,
    context_lens_B: Tensor,
    block_table_BM: Tensor,
    num_tokens: int,
    tile_tokens: int,
    num_blocks: int,
    tokens_per_block: int,
) -> Tiles:
    """Cut the packed rows into tiles of at most ``tile_tokens`` of one sequence.

    Raises:
        ValueError: lengths or block numbers that cannot be.
    """
    num_seqs, max_blocks = block_table_BM.shape
    work_W = torch.empty(work_numbers(num_tokens, num_seqs, tile_tokens), dtype=torch.int64)
    num_tiles, num_keys = plan_tiles(
        query_start_B1.data_ptr(),
        context_lens_B.data_ptr(),
        num_seqs,
        num_tokens,
        block_table_BM.data_ptr(),
        block_table_BM.stride(0) * 4,
        max_blocks,
        num_blocks,
        tokens_per_block,
        tile_tokens,
        work_W.data_ptr(),
    )
    if num_tiles < 0:
        raise ValueError(
            _impossible(
                num_keys, num_tokens, query_start_B1, context_lens_B, block_table_BM, num_blocks, tokens_per_block
            )
        )
    return Tiles(work_W, num_tiles, num_keys)


def _impossible(
    seq: int, num_tokens: int, start: Tensor, lens: Tensor, table: Tensor, num_blocks: int, tokens_per_block: int
) -> str:
    if seq == len(lens):
        return f"query starts go from {int(start[0])} to {int(start[-1])}, but q has rows 0 to {num_tokens}"
    return (
        f"sequence {seq} has query rows {int(start[seq])} to {int(start[seq + 1])} of {num_tokens}, a context of "
        f"{int(lens[seq])} tokens and the blocks {table[seq].tolist()}; the queries must be the context's last tokens, "
        f"and every {tokens_per_block} tokens of context need a block of the {num_blocks} there are"
    )
