"""Kernels that pass over rows once on CPU: RMS norm, rotary embedding with cache writes, and SwiGLU.

Each checks its tensors and makes one call of native/rows.cpp in place of several torch operations, each of which costs a
microsecond before it computes anything.
"""

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import struct
from tightwire.kernels.cpu.run import NUMBER_KIND, run_on_rows

_DTYPES = ", ".join(map(str, NUMBER_KIND))


def rms_norm_cpu(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    _check_norm(x_TD, x_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=weight_D.dtype)
    _norm(out_TD, None, x_TD, None, weight_D, eps)
    return out_TD


def add_rms_norm_cpu(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check_norm(x_TD, residual_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=weight_D.dtype)
    sum_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    _norm(out_TD, sum_TD, x_TD, residual_TD, weight_D, eps)
    return out_TD, sum_TD


def _check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    if residual.shape != x.shape or weight.shape[0] != x.shape[1] or x.stride(1) != 1 or residual.stride(1) != 1:
        raise ValueError(
            "rms_norm needs x and residual (T, D) with contiguous rows and weight (D,); "
            f"got {tuple(x.shape)}, {tuple(residual.shape)} and {tuple(weight.shape)}"
        )
    if (
        weight.dtype not in NUMBER_KIND
        or x.dtype not in (torch.float32, weight.dtype)
        or residual.dtype != x.dtype
        or weight.stride(0) != 1
    ):
        raise ValueError(
            f"rms_norm needs weight in one of {_DTYPES}, x and residual in that dtype or in torch.float32; "
            f"got {weight.dtype}, {x.dtype} and {residual.dtype}"
        )


def _norm(out: Tensor, total: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
    num_tokens, size = x.shape
    number_bytes = x.element_size()
    arguments = (
        out.data_ptr(),
        0 if total is None else total.data_ptr(),
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        x.stride(0) * number_bytes,
        0 if residual is None else residual.stride(0) * number_bytes,
        size,
        NUMBER_KIND[weight.dtype],
        NUMBER_KIND[x.dtype],
        eps,
    )
    run_on_rows("tw_norm", struct("tw_norm_args", arguments), num_tokens, size)


def rotate_and_cache_cpu(
    qkv_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor
) -> Tensor:
    num_tokens, num_all_heads, head_dim = qkv_THE.shape
    _, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    num_heads, number_bytes = num_all_heads - 2 * num_kv_heads, qkv_THE.element_size()
    q_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_THE.dtype)
    addresses = (each.data_ptr() for each in (q_THE, qkv_THE, cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T))
    arguments = (
        *addresses,
        *(stride * number_bytes for stride in qkv_THE.stride()[:2]),
        cos_TE.stride(0) * 4,
        sin_TE.stride(0) * 4,
        k_cache_NKPE.stride(0) * number_bytes,
        num_heads,
        num_kv_heads,
        head_dim // 2,
        tokens_per_block,
        NUMBER_KIND[qkv_THE.dtype],
    )
    run_on_rows("tw_rotate_and_cache", struct("tw_rotate_args", arguments), num_tokens, num_all_heads * head_dim)
    return q_THE


def swiglu_cpu(gate_up_T2F: Tensor) -> Tensor:
    num_tokens, columns = gate_up_T2F.shape
    if columns % 2 or gate_up_T2F.dtype not in NUMBER_KIND or gate_up_T2F.stride(1) != 1:
        raise ValueError(
            f"swiglu needs (T, 2F) with contiguous rows in one of {_DTYPES}; "
            f"got {tuple(gate_up_T2F.shape)} {gate_up_T2F.dtype} with strides {gate_up_T2F.stride()}"
        )
    out_TF = torch.empty((num_tokens, columns // 2), dtype=gate_up_T2F.dtype)
    row_stride = gate_up_T2F.stride(0) * gate_up_T2F.element_size()
    arguments = (out_TF.data_ptr(), gate_up_T2F.data_ptr(), row_stride, columns // 2, NUMBER_KIND[gate_up_T2F.dtype])
    run_on_rows("tw_swiglu", struct("tw_swiglu_args", arguments), num_tokens, columns)
    return out_TF
