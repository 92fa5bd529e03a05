"""Normalization, rotation, activation and matrix product in torch: what the kernels of a layer must compute."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.kernels.spec.attention import NUMBERS, apply_rope_reference, write_kv_reference
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS
from tightwire.kernels.spec.int8_heads import cache_width
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, dequantize_reference
from tightwire.kernels.spec.packed_int8 import linear_int8_reference

_NAMES = ", ".join(map(str, NUMBERS))


class NormForm(NamedTuple):
    """What RMS norms of a model have in common."""

    eps: float
    offset: float = 0.0  # added to the weights
    scale: float = 1.0  # of what ``add_rms_norm`` adds to the residual


class Rotation(NamedTuple):
    """How queries and keys are rotated, and where keys and values are stored."""

    cos_TE: Tensor  # (T, N) float32; the first 2 N numbers of a head are rotated
    sin_TE: Tensor
    k_cache_NKPE: Tensor  # (N, K, P, E), written in place: what q's dtype holds, in the caches' format
    v_cache_NKPE: Tensor
    # int32, block * P + offset within the block. On a GPU slots are not checked, and a negative one marks a padding row: nothing is stored.
    slot_T: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of q and k before their rotation."""

    q_norm: Tensor  # (E,), or (H E,) if the heads have one norm together
    k_norm: Tensor
    form: NormForm
    whole: bool = False  # one norm of all heads together
    mean_squares_T2: Tensor | None = None  # float32, of all ranks' heads of q and of k; None: those given are all


class SumNorms(NamedTuple):
    """The norms of ``add_rms_norm``; their weights have one dtype."""

    weight_D: Tensor | None  # of the sum
    form: NormForm
    x_weight_D: Tensor | None = None  # of what is added
    dtype: torch.dtype | None = None  # of the first result, if there is no ``weight``


class RowProduct(NamedTuple):
    """What ``norm_linear`` multiplies a row's norm with, and computes of the product."""

    weight_OD: Tensor
    bias_O: Tensor | None = None
    gelu: bool | None = None  # ``swiglu`` of the product, with or without gelu; None: neither
    rotation: Rotation | None = None  # of queries and keys without norms; caches have the dtype of the weights


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, form: NormForm) -> Tensor:
    """``(weight + offset) * (x / sqrt(mean(x^2) + eps))`` in float32, rounded once to the dtype of the weight."""
    return _normed(x_TD, weight_D, form).to(weight_D.dtype)


def _normed(x_TD: Tensor, weight_D: Tensor, form: NormForm, mean_T1: Tensor | None = None) -> Tensor:
    x32_TD = x_TD.float()
    mean_T1 = x32_TD.square().mean(-1, keepdim=True) if mean_T1 is None else mean_T1
    return x32_TD * torch.rsqrt(mean_T1 + form.eps) * (weight_D.float() + form.offset)


def add_rms_norm_reference(x_TD: Tensor, residual_TD: Tensor | None, norms: SumNorms) -> tuple[Tensor, Tensor]:
    """``s = scale * x + residual``; returns ``(rms_norm(s), s)``. Without a residual x is normalized, and there is no sum.

    With ``x_weight``, which needs a residual, x is normalized first. Without ``weight`` the first result is s, rounded to ``dtype``.
    """
    weight_D, form, x_weight_D, dtype = norms
    if x_weight_D is not None:
        x_TD = _normed(x_TD, x_weight_D, form).to(x_TD.dtype)
    sum_TD = x_TD if residual_TD is None else x_TD * form.scale + residual_TD
    return (sum_TD.to(dtype) if weight_D is None else rms_norm_reference(sum_TD, weight_D, form)), sum_TD


def head_norm(x_THE: Tensor, weight: Tensor, norms: HeadNorms, column: int) -> Tensor:
    """The queries (column 0) or keys (1), normalized, in their dtype."""
    x_TX, mean_T1 = (x_THE.flatten(1) if norms.whole else x_THE), None
    if norms.mean_squares_T2 is not None:
        mean_T1 = norms.mean_squares_T2[:, column : column + 1]
    return _normed(x_TX, weight, norms.form, mean_T1).view(x_THE.shape).to(x_THE.dtype)


def rotate_and_cache_reference(qkv_THE: Tensor, rotation: Rotation, norms: HeadNorms | None = None) -> Tensor:
    """The norms of queries and keys, ``apply_rope_reference`` of both, then ``write_kv_reference``."""
    cos_TE, sin_TE, k_cache_NKPE, v_cache_NKPE, slot_T = rotation
    num_kv_heads = k_cache_NKPE.shape[1]
    num_heads = qkv_THE.shape[1] - 2 * num_kv_heads
    q_THE, k_TKE, v_TKE = torch.split(qkv_THE, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        q_THE, k_TKE = head_norm(q_THE, norms.q_norm, norms, 0), head_norm(k_TKE, norms.k_norm, norms, 1)
    write_kv_reference(apply_rope_reference(k_TKE, cos_TE, sin_TE), v_TKE, k_cache_NKPE, v_cache_NKPE, slot_T)
    return apply_rope_reference(q_THE, cos_TE, sin_TE)


def swiglu_reference(gate_up_T2F: Tensor, *, gelu: bool = False) -> Tensor:
    """``silu(gate) * up``, or with gelu by tanh, in float32, rounded once; gate is the first half of the columns."""
    gate_TF, up_TF = gate_up_T2F.float().chunk(2, dim=-1)
    active_TF = F.gelu(gate_TF, approximate="tanh") if gelu else F.silu(gate_TF)
    return (active_TF * up_TF).to(gate_up_T2F.dtype)


def linear_reference(
    x_TD: Tensor, weight_OD: Matrix, bias_O: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ weight.T + bias``, summed in float32, rounded once. Packed weights are rounded to x's dtype first."""
    if isinstance(weight_OD, PackedMatrix):
        if weight_OD.format.int8_activations:
            return linear_int8_reference(x_TD, weight_OD, bias_O, out_dtype)
        weight_OD = dequantize_reference(weight_OD, x_TD.dtype)
    if out_dtype in (None, x_TD.dtype):
        return F.linear(x_TD, weight_OD, bias_O)
    return F.linear(x_TD.float(), weight_OD.float(), None if bias_O is None else bias_O.float()).to(out_dtype)


def norm_linear_reference(
    x_1D: Tensor | None, residual_1D: Tensor, norm_D: Tensor, form: NormForm, product: RowProduct
) -> tuple[Tensor, Tensor]:
    """The product of ``rms_norm(s)`` in float32, rounded once; and s, as in ``add_rms_norm``, or the residual.

    With a ``rotation`` the product's queries, after ``rotate_and_cache_reference``.
    """
    weight_OD, bias_O, gelu, rotation = product
    sum_1D = residual_1D if x_1D is None else add_rms_norm_reference(x_1D, residual_1D, SumNorms(norm_D, form))[1]
    out_1O = F.linear(_normed(sum_1D, norm_D, form), weight_OD.float(), None if bias_O is None else bias_O.float())
    if gelu is not None:
        out_1O = swiglu_reference(out_1O, gelu=gelu)
    if rotation is not None:
        head_dim = rotation.k_cache_NKPE.shape[3]
        out_1O = rotate_and_cache_reference(out_1O.view(1, -1, head_dim), rotation).flatten(1)
    return out_1O.to(norm_D.dtype), sum_1D


def check_rotation(qkv: Tensor, rotation: Rotation, norms: HeadNorms | None) -> None:
    """Raise ValueError unless these are the arguments of ``rotate_and_cache``. Slots are not read."""
    cos, sin, k_cache, v_cache, slots = rotation
    num_tokens, num_all_heads, head_dim = qkv.shape
    _, num_kv_heads, tokens_per_block, width = k_cache.shape
    fits = head_dim % 2 == 0 and width == cache_width(head_dim, k_cache.dtype) and num_all_heads > 2 * num_kv_heads
    angles = num_tokens, min(cos.shape[1], head_dim // 2)
    same_rows = (cos.shape, sin.shape, slots.shape) == (angles, angles, (num_tokens,))
    caches = [(cache.shape, cache.dtype, cache.stride()[1:]) for cache in (k_cache, v_cache)]
    wanted = k_cache.shape, k_cache.dtype, (tokens_per_block * width, width, 1)
    types = cos.dtype, sin.dtype, slots.dtype, qkv.dtype in NUMBERS and k_cache.dtype in (*NUMBERS, torch.int8)
    last = qkv.stride(2), cos.stride(1), sin.stride(1), slots.stride(0)
    if (
        not (fits and same_rows and caches == [wanted] * 2)
        or k_cache.stride(0) != v_cache.stride(0)
        or types != (torch.float32, torch.float32, torch.int32, True)
        or last != (1, 1, 1, 1)
    ):
        named = {"qkv": qkv, "cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache, "slots": slots}
        got = "; ".join(f"{name} {tuple(x.shape)} {x.dtype} {x.stride()}" for name, x in named.items())
        raise ValueError(
            "rotate_and_cache needs qkv (T, H + 2 K, E) with E even, in one of "
            f"{_NAMES}; cos and sin (T, E/2 or less) float32; caches (N, K, P, E), or of int8 (N, K, P, E + 2), of one "
            f"layout; slots (T,) int32; and contiguous heads, angles, cache blocks and slots; got {got}"
        )
    if norms is not None:
        _check_head_norms(norms, qkv, num_all_heads - 2 * num_kv_heads, num_kv_heads)


def _check_head_norms(norms: HeadNorms, qkv: Tensor, num_heads: int, num_kv_heads: int) -> None:
    num_tokens, _, head_dim = qkv.shape
    squares_T2 = norms.mean_squares_T2
    wanted = [(head_dim * count if norms.whole else head_dim,) for count in (num_heads, num_kv_heads)]
    got = [tuple(weight.shape) for weight in (norms.q_norm, norms.k_norm)]
    dtypes = {norms.q_norm.dtype, norms.k_norm.dtype, qkv.dtype}
    if got != wanted or len(dtypes) > 1 or not all(weight.is_contiguous() for weight in norms[:2]):
        needs = f"norms of q and k need contiguous weights of {wanted[0][0]} and {wanted[1][0]} numbers in {qkv.dtype}"
        raise ValueError(f"{needs}; got {got[0]} {norms.q_norm.dtype} and {got[1]} {norms.k_norm.dtype}")
    if squares_T2 is not None and (
        squares_T2.shape != (num_tokens, 2) or squares_T2.dtype != torch.float32 or not squares_T2.is_contiguous()
    ):
        raise ValueError(f"mean squares must be ({num_tokens}, 2) float32, contiguous; got {tuple(squares_T2.shape)}")


def check_add_norm(x: Tensor, residual: Tensor | None, norms: SumNorms) -> None:
    """Raise ValueError unless these are the arguments of ``add_rms_norm``."""
    weight, _, x_weight, dtype = norms
    if x_weight is not None and residual is None:
        raise ValueError("x_weight needs a residual; without one x has the other weight's norm")
    weights = [each for each in (weight, x_weight) if each is not None]
    for each in weights or [torch.empty(x.shape[1:], dtype=dtype, device="meta")]:
        check_norm(x, x if residual is None else residual, each)
    out_dtype = dtype if weight is None else weight.dtype
    if x_weight is not None and x_weight.dtype != out_dtype:
        raise ValueError(f"rms_norm needs weights of one dtype, got {out_dtype} and {x_weight.dtype}")


def check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless these are tensors of ``rms_norm``, with x as the residual."""
    if residual.shape != x.shape or weight.shape != x.shape[1:] or x.stride(1) != 1 or residual.stride(1) != 1:
        needs = "rms_norm needs x and residual (T, D) with contiguous rows and weight (D,)"
        raise ValueError(f"{needs}; got {tuple(x.shape)}, {tuple(residual.shape)} and {tuple(weight.shape)}")
    fits = weight.dtype in NUMBERS and x.dtype in (torch.float32, weight.dtype) and residual.dtype == x.dtype
    if not fits or weight.stride(0) != 1:
        needs = f"rms_norm needs weight in one of {_NAMES}, x and residual in that dtype or in torch.float32"
        raise ValueError(f"{needs}; got {weight.dtype}, {x.dtype} and {residual.dtype}")


def check_gates(gate_up: Tensor) -> None:
    """Raise ValueError unless this is the tensor of ``swiglu``."""
    if gate_up.shape[1] % 2 or gate_up.dtype not in NUMBERS or gate_up.stride(1) != 1:
        needs = f"swiglu needs (T, 2F) with contiguous rows in one of {_NAMES}"
        raise ValueError(f"{needs}; got {tuple(gate_up.shape)} {gate_up.dtype} with strides {gate_up.stride()}")


def check_linear(x: Tensor, weight: Matrix, bias: Tensor | None) -> None:
    """Raise ValueError unless these are tensors of ``linear``: all on one device, x and bias of one dtype."""
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape[0] != weight.shape[0]):
        raise ValueError(
            "linear needs x (T, D), weight (O, D) and bias (O,) or None; "
            f"got {tuple(x.shape)}, {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
        )
    stored = weight.format.name if isinstance(weight, PackedMatrix) else weight.dtype
    bias_dtype = None if bias is None else bias.dtype
    if x.dtype not in NUMBERS or stored not in (x.dtype, *PACKED_FORMATS) or bias_dtype not in (None, x.dtype):
        needs = f"linear needs x, weight (unless packed) and bias in one of {_NAMES}"
        raise ValueError(f"{needs}; got {x.dtype}, {stored} and {bias_dtype}")
    if weight.device != x.device or (bias is not None and bias.device != x.device):
        raise ValueError(f"linear needs x, weight and bias on one device, got {x.device} and {weight.device}")
    strides = weight.blocks_OB.stride() if isinstance(weight, PackedMatrix) else weight.stride()
    if x.stride(1) != 1 or strides[1] != 1 or (bias is not None and bias.stride(0) != 1):
        raise ValueError(f"linear needs contiguous rows; got strides {x.stride()} and {strides}")
