"""Kernels that pass over rows once on CPU: RMS norm, rotary embedding, SwiGLU, and writing keys and values to the cache.

Each checks its tensors and makes one call of native/rows.cpp in place of several torch operations, each of which costs a
microsecond before it computes anything.
"""

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import lib, struct
from tightwire.kernels.cpu.run import NUMBER_KIND, run_on_rows

_DTYPES = ", ".join(map(str, NUMBER_KIND))


def rms_norm_cpu(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``norm.rms_norm`` for CPU tensors."""
    _check_norm(x_TD, x_TD, weight_D)
    out_TD = torch.empty(x_TD.shape, dtype=weight_D.dtype)
    _norm(out_TD, None, x_TD, None, weight_D, eps)
    return out_TD


def add_rms_norm_cpu(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``norm.add_rms_norm`` for CPU tensors."""
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


def apply_rope_cpu(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """``qkv.apply_rope`` for CPU tensors."""
    _check_rope(x_THE, cos_TE, sin_TE)
    num_tokens, num_heads, head_dim = x_THE.shape
    out_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=x_THE.dtype)
    number_bytes = x_THE.element_size()
    arguments = (
        out_THE.data_ptr(),
        x_THE.data_ptr(),
        cos_TE.data_ptr(),
        sin_TE.data_ptr(),
        x_THE.stride(0) * number_bytes,
        x_THE.stride(1) * number_bytes,
        cos_TE.stride(0) * 4,
        sin_TE.stride(0) * 4,
        num_heads,
        head_dim // 2,
        NUMBER_KIND[x_THE.dtype],
    )
    run_on_rows("tw_rope", struct("tw_rope_args", arguments), num_tokens, num_heads * head_dim)
    return out_THE


def _check_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    num_tokens, _, head_dim = x.shape
    if head_dim % 2 or cos.shape != (num_tokens, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(
            "rope needs x (T, H, E) with E even, cos and sin (T, E/2); "
            f"got {tuple(x.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if x.dtype not in NUMBER_KIND or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(
            f"rope needs x in one of {_DTYPES}, cos and sin in float32; got {x.dtype}, {cos.dtype} and {sin.dtype}"
        )
    if x.stride(2) != 1 or cos.stride(1) != 1 or sin.stride(1) != 1:
        raise ValueError("rope needs the last dimension of x, cos and sin contiguous")


def swiglu_cpu(gate_up_T2F: Tensor) -> Tensor:
    """``swiglu.swiglu`` for CPU tensors."""
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


def write_kv_cpu(k_TKE: Tensor, v_TKE: Tensor, k_cache_NKPE: Tensor, v_cache_NKPE: Tensor, slot_T: Tensor) -> None:
    """``qkv.write_kv`` for CPU tensors."""
    num_tokens, num_kv_heads, head_dim = shape = k_TKE.shape
    num_blocks, cache_heads, tokens_per_block, cache_dim = k_cache_NKPE.shape
    strides, dtype = k_cache_NKPE.stride(), k_cache_NKPE.dtype
    if v_TKE.shape != shape or (num_kv_heads, head_dim) != (cache_heads, cache_dim) or len(slot_T) != num_tokens:
        raise ValueError(
            "write_kv needs k and v (T, K, E), caches (N, K, P, E) and slots (T,); "
            f"got {tuple(shape)}, {tuple(v_TKE.shape)}, {tuple(k_cache_NKPE.shape)} and {tuple(slot_T.shape)}"
        )
    if k_TKE.dtype != dtype or v_TKE.dtype != dtype or v_cache_NKPE.dtype != dtype or slot_T.dtype != torch.int32:
        raise ValueError(
            "write_kv needs k, v and caches in one dtype and int32 slots; "
            f"got {k_TKE.dtype}, {v_TKE.dtype}, {dtype}, {v_cache_NKPE.dtype} and {slot_T.dtype}"
        )
    if (
        v_cache_NKPE.shape != k_cache_NKPE.shape
        or v_cache_NKPE.stride() != strides
        or strides[1:] != (tokens_per_block * head_dim, head_dim, 1)
        or k_TKE.stride(2) != 1
        or v_TKE.stride(2) != 1
        or slot_T.stride(0) != 1
    ):
        raise ValueError("write_kv needs equal caches, and contiguous heads, cache blocks and slots")
    number_bytes = k_cache_NKPE.element_size()
    arguments = (
        k_TKE.data_ptr(),
        v_TKE.data_ptr(),
        k_cache_NKPE.data_ptr(),
        v_cache_NKPE.data_ptr(),
        slot_T.data_ptr(),
        k_TKE.stride(0) * number_bytes,
        k_TKE.stride(1) * number_bytes,
        v_TKE.stride(0) * number_bytes,
        v_TKE.stride(1) * number_bytes,
        strides[0] * number_bytes,
        num_blocks,
        num_kv_heads,
        tokens_per_block,
        head_dim * number_bytes,
    )
    wrong = lib.tw_write_kv(struct("tw_write_kv_args", arguments), num_tokens)
    if wrong >= 0:
        raise ValueError(
            f"token {wrong} has slot {int(slot_T[wrong])}; the cache has slots 0 to {num_blocks * tokens_per_block - 1}"
        )
