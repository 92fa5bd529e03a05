"""Paged attention on CPU: checks and argument structs around ``native/attention``."""

from typing import Any

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import lib, struct
from tightwire.kernels.cpu.run import CACHE_KIND, NUMBER_KIND, addresses, run_on_items
from tightwire.kernels.spec.attention import LOG2_E, AttentionForm, PackedSequences, check_attention

# Most query rows per tile, unless one token alone has more heads per KV head; twice as many where each thread has eight such tiles. With
# 64 a prompt of 512 takes 1.05 to 1.1 times as long on a Zen 4, because each tile widens its keys and values anew; with 192 0.95.
ROWS = 96

# One thread does this many score and value multiplications in about 100 us; waking another for less costs more.
_WORK_PER_THREAD = 4_000_000


def paged_attention_cpu(
    q_THE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, sequences: PackedSequences, form: AttentionForm
) -> Tensor:
    """``attention.paged_attention`` for CPU tensors. Cost: about 12 us of Python per call, then the kernels."""
    scale, _, window, cap, key_bias = form
    groups = form.groups_of(q_THE, k_cache_NKPE)
    if not scale > 0 or window < 0 or not cap >= 0:
        raise ValueError(f"attention needs a positive scale, window and cap (or 0), got {scale}, {window} and {cap}")
    check_attention(q_THE, k_cache_NKPE, v_cache_NKPE, sequences, form)
    if key_bias is not None and len(sequences.context_lens_B):
        longest = int(sequences.context_lens_B.max())
        if len(key_bias.cos_SN) < longest:
            raise ValueError(f"a bias of keys needs cosines of {longest} positions, got {len(key_bias.cos_SN)}")
    num_tokens, num_heads, head_dim = q_THE.shape
    num_blocks, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    indices, most_tokens = sequences[:3], most_tile_tokens(groups.heads_per_kv_head, num_tokens * num_heads)
    tiles_W3, num_tiles, num_keys = cut_into_tiles(indices, num_tokens, most_tokens, num_blocks, tokens_per_block)
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype)
    places = addresses(out_THE, q_THE, k_cache_NKPE, v_cache_NKPE, *indices, tiles_W3)
    token_stride, head_stride, _ = q_THE.stride()
    q_bytes = q_THE.element_size()
    queries = token_stride * q_bytes, head_stride * q_bytes, NUMBER_KIND[q_THE.dtype]
    cache = k_cache_NKPE.stride(0) * k_cache_NKPE.element_size(), CACHE_KIND[k_cache_NKPE.dtype]
    sizes = sequences.block_table_BM.stride(0) * 4, tokens_per_block, num_heads, num_kv_heads, *groups, head_dim
    scores = scale * LOG2_E, cap * LOG2_E, window
    bias = (0, 0, 0, 0) if key_bias is None else (*addresses(*key_bias), key_bias.cos_SN.shape[1])
    arguments = struct("tw_attend_args", (*places, *queries, *cache, *sizes, *scores, bias))
    rows = min(most_tokens, num_tokens) * groups.heads_per_kv_head
    multiplications = num_keys * num_kv_heads * head_dim * (8 + rows)
    num_items = num_tiles * num_kv_heads
    max_threads = min(num_items, 1 + multiplications // _WORK_PER_THREAD)
    run_on_items("tw_attend", arguments, num_items, 1, max_threads)
    return out_THE


def most_tile_tokens(heads_per_kv_head: int, num_rows: int) -> int:
    """Return how many tokens a tile may have. ``num_rows``: rows of queries, which are tokens times heads."""
    rows = 2 * ROWS if num_rows >= 8 * 2 * ROWS * torch.get_num_threads() else ROWS
    return max(1, rows // heads_per_kv_head)


def cut_into_tiles(
    indices: tuple[Tensor, Tensor, Tensor], num_tokens: int, most_tokens: int, num_blocks: int, tokens_per_block: int
) -> tuple[Tensor, int, int]:
    """Cut each sequence into tiles of at most ``most_tokens`` tokens; raises ValueError for impossible lengths or blocks.

    ``indices`` are the tensors of ``PackedSequences``. Returns (W, 3) for the kernel, the number of tiles, and of the keys that
    they visit in all.
    """
    start, lens, table = indices
    num_seqs, max_blocks = table.shape
    tiles_W3 = torch.empty(num_tokens // most_tokens + num_seqs, 3, dtype=torch.int64)
    places = addresses(*indices, tiles_W3)
    blocks = table.stride(0) * 4, max_blocks, num_blocks, tokens_per_block
    plan: Any = struct("tw_plan_args", (*places, num_seqs, num_tokens, most_tokens, *blocks))
    seq = lib.tw_plan_tiles(plan)  # the first that is impossible, or their number; else -1
    if seq == len(lens):
        raise ValueError(f"query starts go from {int(start[0])} to {int(start[-1])}, but q has rows 0 to {num_tokens}")
    if seq >= 0:
        raise ValueError(
            f"sequence {seq} has query rows {int(start[seq])} to {int(start[seq + 1])} of {num_tokens}, a context of "
            f"{int(lens[seq])} tokens and the blocks {table[seq].tolist()}; the queries must be the context's last "
            f"tokens, and every {tokens_per_block} tokens of context need a block of the {num_blocks} there are"
        )
    return tiles_W3, plan.num_tiles, plan.num_keys
