"""What ``attention.paged_attention`` refuses before a kernel walks tensors by address, on a CPU or a GPU."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


class HeadGroups(NamedTuple):
    """Which query heads share a KV head: neighbours, ``heads_per_kv_head`` each, but of the first group ``skipped_heads`` are
    not there (0: all are), and of the last one maybe some: a rank's heads may begin and end inside a group."""

    heads_per_kv_head: int
    skipped_heads: int

    @classmethod
    def of_part(cls, num_heads: int, num_kv_heads: int, heads_per_kv_head: int, skipped_heads: int) -> Self:
        """Of a rank's heads. Of a single group what is missing needs no room in a kernel's tiles."""
        return cls(num_heads, 0) if num_kv_heads == 1 else cls(heads_per_kv_head, skipped_heads)


def even_groups(q_THE: Tensor, k_cache_NKPE: Tensor) -> HeadGroups:
    """All groups whole, and so alike."""
    return HeadGroups(q_THE.shape[1] // k_cache_NKPE.shape[1], 0)


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, lens: Tensor, table: Tensor, groups: HeadGroups
) -> None:
    """Raise ValueError unless shapes, dtypes, strides and devices are what the kernels count on."""
    shape, strides = k_cache.shape, k_cache.stride()
    _, num_kv_heads, tokens_per_block, head_dim = shape
    per_kv_head, skipped = groups
    in_groups = 0 <= skipped < per_kv_head and -(-(skipped + q.shape[1]) // per_kv_head) == num_kv_heads
    if not in_groups or q.shape[2] != head_dim or v_cache.shape != shape:
        raise ValueError(
            "attention wants q (T, H, E), caches (N, K, P, E) and as many groups of query heads as KV heads; got q "
            f"{tuple(q.shape)} in groups of {per_kv_head} without the first {skipped}, caches {tuple(shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    if q.dtype not in NUMBERS or k_cache.dtype not in NUMBERS or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"attention knows {', '.join(map(str, NUMBERS))}, one for both caches; "
            f"got q {q.dtype}, caches {k_cache.dtype} and {v_cache.dtype}"
        )
    if q.stride(2) != 1 or strides[1:] != (tokens_per_block * head_dim, head_dim, 1) or v_cache.stride() != strides:
        raise ValueError(
            "attention wants the numbers of a head contiguous, each cache block contiguous, and both caches alike; "
            f"got strides q {q.stride()}, caches {strides} and {v_cache.stride()}"
        )
    num_seqs = table.shape[0]
    if start.shape[0] != num_seqs + 1 or lens.shape[0] != num_seqs:
        raise ValueError(
            f"for {num_seqs} rows of the block table attention wants {num_seqs + 1} query starts and {num_seqs} "
            f"context lengths; got {start.shape[0]} and {lens.shape[0]}"
        )
    device = q.device
    for index in (start, lens, table):
        if index.dtype != torch.int32 or index.stride(-1) != 1 or index.device != device:
            raise ValueError(
                "attention wants its index tensors in int32, contiguous, on q's device; "
                f"got {index.dtype} on {index.device} with strides {index.stride()}"
            )
    if k_cache.device != device or v_cache.device != device:
        raise ValueError(
            f"attention wants q and caches on one device; got {device}, {k_cache.device} and {v_cache.device}"
        )
