"""Normalization, rotation, cache writes and SwiGLU; ``spec.layer_ops`` has the references.

A row's bits depend on that row alone. Shapes, dtypes and layouts that do not match raise ValueError.
"""

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import available
from tightwire.kernels.cpu.rows import add_rms_norm_cpu, rotate_and_cache_cpu, swiglu_cpu
from tightwire.kernels.spec.layer_ops import (
    HeadNorms,
    NormForm,
    Rotation,
    RowProduct,
    SumNorms,
    add_rms_norm_reference,
    check_add_norm,
    check_gates,
    check_linear,
    check_norm,
    check_rotation,
    norm_linear_reference,
    rotate_and_cache_reference,
    swiglu_reference,
)


def rms_norm(x_TD: Tensor, weight_D: Tensor, form: NormForm) -> Tensor:
    """``rms_norm_reference``, equal to it except for the order of the float32 sum over D; in the dtype of the weight."""
    return add_rms_norm(x_TD, None, SumNorms(weight_D, form))[0]


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor | None, norms: SumNorms) -> tuple[Tensor, Tensor]:
    """``add_rms_norm_reference`` in one pass: the normalized sum and the sum itself, both new tensors."""
    check_add_norm(x_TD, residual_TD, norms)
    if x_TD.is_cuda:  # imported on first use, here and below: a CPU host need not have Triton
        from tightwire.kernels.cuda import layer_ops as triton

        return triton.add_rms_norm(x_TD, residual_TD, norms)
    return (add_rms_norm_cpu if available() else add_rms_norm_reference)(x_TD, residual_TD, norms)


def norm_linear(
    x_1D: Tensor | None, residual_1D: Tensor, norm_D: Tensor, form: NormForm, product: RowProduct
) -> tuple[Tensor, Tensor]:
    """``norm_linear_reference`` of one row, on a GPU in one kernel; the order of its sums differs. Cost: the bytes of the weights."""
    weight_OD, bias_O, gelu, rotation = product
    if len(residual_1D) != 1 or (gelu is not None and weight_OD.shape[0] % 2):
        given = f"{len(residual_1D)} and {len(weight_OD)}"
        raise ValueError(f"norm_linear takes one row, and with gates an even number of outputs; got {given}")
    check_norm(residual_1D if x_1D is None else x_1D, residual_1D, norm_D)
    check_linear(norm_D[None], weight_OD, bias_O)
    if rotation is not None:
        head_dim, dtype = rotation.k_cache_NKPE.shape[3], rotation.k_cache_NKPE.dtype
        if gelu is not None or dtype != weight_OD.dtype or len(weight_OD) % head_dim:
            given = f"{len(weight_OD)} of {weight_OD.dtype} and gelu={gelu}"
            raise ValueError(f"norm_linear rotates, without gates, heads of {head_dim} numbers of {dtype}; got {given}")
        heads_1HE = torch.empty(1, len(weight_OD) // head_dim, head_dim, dtype=dtype, device="meta")
        check_rotation(heads_1HE, rotation, None)
        if not residual_1D.is_cuda:
            check_slots(rotation.slot_T, rotation.k_cache_NKPE.shape[0] * rotation.k_cache_NKPE.shape[2])
    if not residual_1D.is_cuda:
        return norm_linear_reference(x_1D, residual_1D, norm_D, form, product)
    from tightwire.kernels.cuda.linear_row import norm_linear_row

    return norm_linear_row(x_1D, residual_1D, norm_D, form, product)


def check_slots(slot_T: Tensor, num_slots: int) -> None:
    """Raise ValueError unless all slots are in a cache with ``num_slots``. Not for slots on a GPU. Cost: about 6 us."""
    if len(slot_T) and not 0 <= int(slot_T.min()) <= int(slot_T.max()) < num_slots:
        raise ValueError(f"slots are {slot_T.tolist()}; the cache has slots 0 to {num_slots - 1}")


def rotate_and_cache(
    qkv_THE: Tensor, rotation: Rotation, norms: HeadNorms | None = None, *, slots_are_checked: bool = False
) -> Tensor:
    """Rotate queries and keys, store keys and values at their slots, give the queries: the reference, bit for bit.

    With ``norms`` equal to it but for the order of their sums; they may be stored in ``qkv``.

    Args:
        qkv_THE: (T, H + 2 K, E) query heads, key heads, value heads; may be a view as long as E is contiguous. If the caches have
            another format, its keys and values may change.
        slots_are_checked: the caller has called ``check_slots``, once for all layers of a step.
    Returns:
        (T, H, E) rotated queries, contiguous.
    Raises:
        ValueError: shapes or dtypes that do not match, or (on CPU) a slot outside the cache.
    """
    check_rotation(qkv_THE, rotation, norms)
    if qkv_THE.is_cuda:
        from tightwire.kernels.cuda import layer_ops as triton

        return triton.rotate_and_cache(qkv_THE, rotation, norms)
    if not slots_are_checked:
        check_slots(rotation.slot_T, rotation.k_cache_NKPE.shape[0] * rotation.k_cache_NKPE.shape[2])
    return (rotate_and_cache_cpu if available() else rotate_and_cache_reference)(qkv_THE, rotation, norms)


def swiglu(gate_up_T2F: Tensor, *, gelu: bool = False) -> Tensor:
    """``swiglu_reference``, within a few units in the last place of float32 before it rounds; contiguous."""
    check_gates(gate_up_T2F)
    if gate_up_T2F.is_cuda:
        from tightwire.kernels.cuda import layer_ops as triton

        return triton.swiglu(gate_up_T2F, gelu=gelu)
    return (swiglu_cpu if available() else swiglu_reference)(gate_up_T2F, gelu=gelu)
