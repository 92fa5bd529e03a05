"""Kernels that pass over rows once on CPU: RMS norm, rotary embedding with cache writes, and SwiGLU or GeGLU.

Each makes one call of native/rows.cpp in place of several torch operations, each of which costs a microsecond before it
computes anything.
"""

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import struct
from tightwire.kernels.cpu.run import CACHE_KIND, NUMBER_KIND, addresses, run_on_rows
from tightwire.kernels.spec.layer_ops import HeadNorms, Rotation, SumNorms


def add_rms_norm_cpu(x_TD: Tensor, residual_TD: Tensor | None, norms: SumNorms) -> tuple[Tensor, Tensor]:
    weight_D, form, x_weight_D, dtype = norms
    out_TD = torch.empty(x_TD.shape, dtype=dtype if weight_D is None else weight_D.dtype)
    sum_TD = out_TD if residual_TD is None else torch.empty(x_TD.shape, dtype=x_TD.dtype)
    places = addresses(out_TD, None if residual_TD is None else sum_TD, x_TD, residual_TD, weight_D)
    strides = [0 if each is None else each.stride(0) * each.element_size() for each in (x_TD, residual_TD)]
    kinds = NUMBER_KIND[out_TD.dtype], NUMBER_KIND[x_TD.dtype]
    arguments = *places, *strides, x_TD.shape[1], *kinds, *form, *addresses(x_weight_D)
    run_on_rows("tw_norm", struct("tw_norm_args", arguments), *x_TD.shape)
    return out_TD, sum_TD


def rotate_and_cache_cpu(qkv_THE: Tensor, rotation: Rotation, norms: HeadNorms | None = None) -> Tensor:
    cos_TE, sin_TE, k_cache_NKPE, *_ = rotation
    num_tokens, num_all_heads, head_dim = qkv_THE.shape
    _, num_kv_heads, tokens_per_block, _ = k_cache_NKPE.shape
    num_heads, number_bytes = num_all_heads - 2 * num_kv_heads, qkv_THE.element_size()
    q_THE = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_THE.dtype)
    head_norms = (0, 0, 0, 0, 0.0, 0.0)  # the fields of ``tw_head_norms``
    if norms is not None:
        weights = addresses(norms.q_norm, norms.k_norm, norms.mean_squares_T2)
        head_norms = (*weights, int(norms.whole), norms.form.eps, norms.form.offset)
    places = addresses(q_THE, qkv_THE, *rotation)
    qkv_strides = qkv_THE.stride(0) * number_bytes, qkv_THE.stride(1) * number_bytes
    angle_strides = cos_TE.stride(0) * 4, sin_TE.stride(0) * 4
    block_stride = k_cache_NKPE.stride(0) * k_cache_NKPE.element_size()
    sizes = num_heads, num_kv_heads, cos_TE.shape[1], head_dim, tokens_per_block
    kinds = NUMBER_KIND[qkv_THE.dtype], CACHE_KIND[k_cache_NKPE.dtype]
    arguments = *places, *qkv_strides, *angle_strides, block_stride, *sizes, *kinds, head_norms
    run_on_rows("tw_rotate_and_cache", struct("tw_rotate_args", arguments), num_tokens, num_all_heads * head_dim)
    return q_THE


def swiglu_cpu(gate_up_T2F: Tensor, *, gelu: bool = False) -> Tensor:
    num_tokens, columns = gate_up_T2F.shape
    out_TF = torch.empty((num_tokens, columns // 2), dtype=gate_up_T2F.dtype)
    row_stride = gate_up_T2F.stride(0) * gate_up_T2F.element_size()
    kind = NUMBER_KIND[gate_up_T2F.dtype]
    arguments = (*addresses(out_TF, gate_up_T2F), row_stride, columns // 2, kind, int(gelu))
    run_on_rows("tw_swiglu", struct("tw_swiglu_args", arguments), num_tokens, columns)
    return out_TF
