"""Normalization, rotation, cache writes and SwiGLU; ``spec.layer_ops`` has the references.

A row's bits depend on that row alone. Shapes, dtypes and layouts that do not match raise ValueError.
"""

from importlib import import_module
from types import ModuleType

from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.rows import add_rms_norm_cpu, apply_rope_cpu, rms_norm_cpu, swiglu_cpu, write_kv_cpu
from tightwire.kernels.spec.attention import write_kv_reference
from tightwire.kernels.spec.layer_ops import (
    add_rms_norm_reference,
    apply_rope_reference,
    rms_norm_reference,
    swiglu_reference,
)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``rms_norm_reference``, equal to it except for the order of the float32 sum over D; in the dtype of the weight."""
    if x_TD.is_cuda:
        return _triton().rms_norm(x_TD, weight_D, eps)
    return (rms_norm_cpu if available() else rms_norm_reference)(x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm_reference`` in one pass: the normalized sum and the sum itself, both new tensors."""
    if x_TD.is_cuda:
        return _triton().add_rms_norm(x_TD, residual_TD, weight_D, eps)
    return (add_rms_norm_cpu if available() else add_rms_norm_reference)(x_TD, residual_TD, weight_D, eps)


def apply_rope(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotary position embedding, ``apply_rope_reference`` bit for bit; a new contiguous tensor."""
    if x_THE.device.type != "cpu" or not available():
        return apply_rope_reference(x_THE, cos_TE, sin_TE)
    return apply_rope_cpu(x_THE, cos_TE, sin_TE)


def write_kv(k_TKE: Tensor, v_TKE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor) -> None:
    """Store this step's keys and values in the cache at their slots, in place.

    Args:
        k_TKE, v_TKE: (T, K, E) in the cache's dtype; may be views as long as E is contiguous.
        slot_T: (T,) int32, block * P + offset within the block. On CPU ValueError for one outside the cache.
    """
    if k_cache_NKPE.device.type != "cpu" or not available():
        num_slots = k_cache_NKPE.shape[0] * k_cache_NKPE.shape[2]
        if k_cache_NKPE.device.type == "cpu" and not bool(((slot_T >= 0) & (slot_T < num_slots)).all()):
            raise ValueError(f"slots are {slot_T.tolist()}; the cache has slots 0 to {num_slots - 1}")
        write_kv_reference(k_TKE, v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    else:
        write_kv_cpu(k_TKE, v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)


def rotate_and_cache(
    qkv_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> Tensor:
    """Rotate queries and keys, store keys and values at their slots, give the queries: the reference, bit for bit.

    Args:
        qkv_THE: (T, H + 2 K, E) query heads, key heads, value heads; may be a view as long as E is contiguous.
        cos_TE, sin_TE: (T, E/2) float32.
        k_cache_NKPE, v_cache_NKPE: (N, K, P, E) in qkv's dtype, written in place.
        slot_T: (T,) int32, block * P + offset within the block. On a GPU slots are not checked, and a negative one marks
            a padding row: nothing is stored.
    Returns:
        (T, H, E) rotated queries; on a CPU a view into a wider tensor.
    Raises:
        ValueError: shapes or dtypes that do not match, or (on CPU) a slot outside the cache.
    """
    if qkv_THE.is_cuda:
        return _triton().rotate_and_cache(qkv_THE, cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T)
    num_kv_heads = k_cache_NKPE.shape[1]
    # Queries and keys are adjacent and rotate by the same angles: one call serves both.
    rotated_THE = apply_rope(qkv_THE[:, : qkv_THE.shape[1] - num_kv_heads], cos_TE, sin_TE)
    v_TKE = qkv_THE[:, qkv_THE.shape[1] - num_kv_heads :]
    write_kv(rotated_THE[:, -num_kv_heads:], v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    return rotated_THE[:, :-num_kv_heads]


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """``swiglu_reference``, within a few units in the last place of float32 before it rounds; contiguous."""
    if gate_up_T2F.is_cuda:
        return _triton().swiglu(gate_up_T2F)
    return (swiglu_cpu if available() else swiglu_reference)(gate_up_T2F)


def _triton() -> ModuleType:
    """Import the Triton kernels on first use, because a CPU host need not have Triton."""
    return import_module("tightwire.kernels.cuda.layer_ops")
