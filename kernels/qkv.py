"""Rotation of queries and keys, and writing new keys and values to the cache: the work between projection and attention."""

from importlib import import_module

from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.rows import apply_rope_cpu, write_kv_cpu
from tightwire.kernels.spec.attention import write_kv_reference
from tightwire.kernels.spec.layer_ops import apply_rope_reference


def apply_rope(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotary position embedding, ``apply_rope_reference`` bit for bit; a new contiguous tensor.

    Raises:
        ValueError: on CPU, shapes or dtypes that do not match.
    """
    if x_THE.device.type != "cpu" or not available():
        return apply_rope_reference(x_THE, cos_TE, sin_TE)
    return apply_rope_cpu(x_THE, cos_TE, sin_TE)


def write_kv(k_TKE: Tensor, v_TKE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor) -> None:
    """Store this step's keys and values in the cache at their slots, in place.

    Args:
        k_TKE, v_TKE: (T, K, E) in the cache's dtype; may be views into a wider matrix as long as E is contiguous.
        slot_T: (T,) int32, block * P + offset within the block.
    Raises:
        ValueError: on CPU, shapes or dtypes that do not match, or a slot outside the cache (earlier rows are
            written).
    """
    if k_cache_NKPE.device.type != "cpu" or not available():
        write_kv_reference(k_TKE, v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    else:
        write_kv_cpu(k_TKE, v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)


def rotate_and_cache(
    qkv_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> Tensor:
    """Rotate queries and keys, store keys and values at their slots, give the queries: the reference, bit for bit.

    On a GPU this is one launch; on a CPU a call for the rotation and one for the cache. The angles are gathered once for
    the step's rows, because all layers use the same.

    Args:
        qkv_THE: (T, H + 2 K, E) query heads, key heads, value heads; may be a view as long as E is contiguous.
        cos_TE, sin_TE: (T, E/2) float32.
        k_cache_NKPE, v_cache_NKPE: (N, K, P, E) in qkv's dtype, written in place.
        slot_T: (T,) int32, block * P + offset within the block. On a GPU a negative one marks a padding row: nothing is
            stored. Slots are not checked there.
    Returns:
        (T, H, E) rotated queries; on a CPU a view into a wider tensor.
    Raises:
        ValueError: shapes or dtypes that do not match, or (on CPU) a slot outside the cache.
    """
    if qkv_THE.is_cuda:
        triton = import_module("tightwire.kernels.cuda.qkv")  # imported on first use: a CPU host need not have Triton
        return triton.rotate_and_cache(qkv_THE, cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T)
    num_kv_heads = k_cache_NKPE.shape[1]
    # Queries and keys are adjacent and rotate by the same angles: one call serves both.
    rotated_THE = apply_rope(qkv_THE[:, : qkv_THE.shape[1] - num_kv_heads], cos_TE, sin_TE)
    v_TKE = qkv_THE[:, qkv_THE.shape[1] - num_kv_heads :]
    write_kv(rotated_THE[:, -num_kv_heads:], v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    return rotated_THE[:, :-num_kv_heads]
