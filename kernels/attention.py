"""Causal attention over a paged KV cache, for a packed batch of sequences of unequal lengths.

``spec.attention`` has the reference and the layout of the cache.
"""

from importlib import import_module

from torch import Tensor

from tightwire.kernels.cpu.attention import paged_attention_cpu
from tightwire.kernels.spec.attention import HeadGroups


def paged_attention(
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
    """Causal attention of this step's packed queries over each sequence's cached tokens, this step's included.

    Sequence b's queries are rows ``query_start[b]`` to ``query_start[b + 1]`` of q and stand for its last tokens.
    A row's bits depend on its own sequence alone, and on a GPU on whether it is one of the ``num_decode_rows``.

    Args:
        q_THE: (T, H, E); may be a view into a wider matrix as long as E is contiguous.
        k_cache_NKPE, v_cache_NKPE: (N, K, P, E).
        query_start_B1: (B + 1,) int32, from 0 to T.
        context_lens_B: (B,) int32, tokens in the cache, at least the sequence's queries.
        block_table_BM: (B, M) int32; entries past a sequence's last block are not read.
        num_decode_rows: the number of decode rows, which come first; no sequence has rows of both kinds.
        groups: of query heads that share a KV head; None: H is a multiple of K, and groups are equal.
    Returns:
        (T, H, E), contiguous, in q's dtype.
    Raises:
        ValueError: shapes, dtypes or (on CPU) lengths and block numbers that do not match.
    """
    arguments = (q_THE, k_cache_NKPE, v_cache_NKPE, query_start_B1, context_lens_B, block_table_BM, scale)
    if q_THE.is_cuda:  # imported on first use: a CPU host need not have Triton
        triton = import_module("tightwire.kernels.cuda.attention")
        return triton.paged_attention(*arguments, num_decode_rows=num_decode_rows, groups=groups)
    return paged_attention_cpu(*arguments, num_decode_rows=num_decode_rows, groups=groups)
