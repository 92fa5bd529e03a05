"""What ``attention.paged_attention`` refuses before a kernel walks tensors by address, on a CPU or a GPU."""

import torch
from torch import Tensor

NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, lens: Tensor, table: Tensor) -> None:
    """Raise ValueError unless shapes, dtypes, strides and devices are what the kernels count on."""
    shape, strides = k_cache.shape, k_cache.stride()
    _, num_kv_heads, tokens_per_block, head_dim = shape
    if q.shape[1] % num_kv_heads or q.shape[2] != head_dim or v_cache.shape != shape:
        raise ValueError(
            "attention wants q (T, H, E), caches (N, K, P, E) and H a multiple of K; "
            f"got q {tuple(q.shape)}, caches {tuple(shape)} and {tuple(v_cache.shape)}"
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
