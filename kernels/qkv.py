"""What lies between the query, key and value projection and attention: rotation, and the cache's new keys and values."""

from importlib import import_module

import torch
from torch import Tensor

from tightwire.kernels.attention import write_kv, write_kv_reference
from tightwire.kernels.rope import apply_rope, apply_rope_reference


def rotate_and_cache_reference(
    qkv_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> Tensor:
    """``apply_rope_reference`` of queries and keys, then ``write_kv_reference``."""
    q_THE, k_TKE, v_TKE = _split(qkv_THE, k_cache_NKPE)
    write_kv_reference(apply_rope_reference(k_TKE, cos_TE, sin_TE), v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    return apply_rope_reference(q_THE, cos_TE, sin_TE)


def rotate_and_cache(
    qkv_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> Tensor:
    """Rotate queries and keys, store keys and values at their slots, give the queries: the reference, bit for bit.

    On a GPU one launch (``qkv_triton``); on a CPU a call for the rotation and one for the cache. The angles come gathered
    for the step's rows, because all layers turn by the same: gathering in each would save two launches a step on a
    GPU, and cost as many calls a layer on a CPU.

    Args:
        qkv_THE: (T, H + 2 K, E) query heads, key heads, value heads; may be a view as long as E is contiguous.
        cos_TE, sin_TE: (T, E/2) float32.
        k_cache_NKPE, v_cache_NKPE: (N, K, P, E) in qkv's dtype, written in place.
        slot_T: (T,) int32, block * P + offset within the block. On a GPU a negative one is a padding row's: nothing is
            stored, and no slot is checked.
    Returns:
        (T, H, E) rotated queries; on a CPU a view into a wider tensor.
    Raises:
        ValueError: shapes or dtypes that do not fit together, or (on CPU) a slot outside the cache.
    """
    if qkv_THE.is_cuda:
        triton = import_module("tightwire.kernels.cuda.qkv")  # a CPU host need not have Triton
        return triton.rotate_and_cache(qkv_THE, cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T)
    num_kv_heads = k_cache_NKPE.shape[1]
    # Queries and keys stand side by side and turn by the same angles: one call serves both.
    rotated_THE = apply_rope(qkv_THE[:, : qkv_THE.shape[1] - num_kv_heads], cos_TE, sin_TE)
    v_TKE = qkv_THE[:, qkv_THE.shape[1] - num_kv_heads :]
    write_kv(rotated_THE[:, -num_kv_heads:], v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    return rotated_THE[:, :-num_kv_heads]


def _split(qkv_THE: Tensor, k_cache_NKPE: Tensor) -> tuple[Tensor, ...]:
    num_kv_heads = k_cache_NKPE.shape[1]
    num_heads = qkv_THE.shape[1] - 2 * num_kv_heads
    return torch.split(qkv_THE, [num_heads, num_kv_heads, num_kv_heads], dim=1)
