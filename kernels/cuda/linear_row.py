"""The product of one row on a GPU with what lies beside it: the residual's sum and the norm before, SwiGLU or the rotation after.

So a decode step of one row has three or four launches a layer less. Each program norms the row for itself while it multiplies: the root
multiplies the finished sums, so that no load of weights waits for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.launch import launch, wait_for_last
from tightwire.kernels.cuda.layer_ops import Heads, activated, pair_places
from tightwire.kernels.cuda.numbers import load_operand, narrowed, raw, widened
from tightwire.kernels.spec.layer_ops import NormForm, RowProduct

# Numbers of a row at a time: 16 bytes for each thread of two warps, and with 16 outputs eight times that.
_PLACES = tl.constexpr(512)
_STAGES = tl.constexpr(3)  # one iteration is multiplied while copies of the next are under way, 16 KB for each program


def norm_linear_row(
    x_1D: Tensor | None, residual_1D: Tensor, norm_D: Tensor, form: NormForm, product: RowProduct
) -> tuple[Tensor, Tensor]:
    """Compute ``layer_ops.norm_linear_reference``; the order of the float32 sums differs."""
    weight_OD, bias_O, gelu, rotation = product
    num_outputs, size = weight_OD.shape
    num_stored, heads, given_rotation = num_outputs if gelu is None else num_outputs // 2, None, None
    if rotation is not None:
        head_dim = rotation.k_cache_NKPE.shape[3]
        heads, given_rotation = Heads.of(num_outputs // head_dim, head_dim, rotation), tuple(rotation)
        num_stored = heads.queries * head_dim
    out_1O = norm_D.new_empty(1, num_stored)
    sum_1D = residual_1D if x_1D is None else torch.empty_like(residual_1D)
    outputs = next((each for each in (16, 8) if num_outputs >= 256 * each), 4)  # of a program: all processors have some
    rows, norm, matrix = (x_1D, residual_1D, sum_1D), (norm_D, *form), (weight_OD, weight_OD.stride(0), bias_O)
    given = rows, norm, matrix, out_1O, size, num_outputs, given_rotation, gelu, heads, outputs
    launch(_norm_product, -(-num_outputs // outputs), norm_D.device, *given)
    return out_1O, sum_1D


@triton.jit
def _norm_product(
    rows, norm, matrix, out, size, num_outputs, rotation, GELU: tl.constexpr, heads: tl.constexpr, OUTPUTS: tl.constexpr
):
    wait_for_last()
    x, residual, total = rows
    norm_weight, eps, offset, scale = norm
    weight, row_stride, bias = matrix
    output_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    kept_O = output_O < num_outputs
    # A gate and its factor, or two numbers that are rotated, are neighbours, so that one program has both.
    row_O = output_O
    if GELU is not None:
        row_O = output_O // 2 + output_O % 2 * (num_outputs // 2)
    if heads is not None:
        first_O, second_O = pair_places(output_O // 2 % heads.half, heads)
        row_O = output_O // (2 * heads.half) * (2 * heads.half) + tl.where(output_O % 2 == 0, first_O, second_O)
        turning = _turning(rotation, heads, OUTPUTS // 2)  # before the loop, in which it arrives
    rows_O1 = (row_O.to(tl.int64) * row_stride)[:, None]
    sum_OP = tl.zeros((OUTPUTS, _PLACES), tl.float32)
    square_P = tl.zeros((_PLACES,), tl.float32)
    for first in tl.range(0, size, _PLACES, num_stages=_STAGES):
        place_P = first + tl.arange(0, _PLACES)
        kept_P = place_P < size
        weight_OP = load_operand(weight, rows_O1 + place_P[None, :], kept_O[:, None] & kept_P[None, :]).to(tl.float32)
        value_P = widened(tl.load(raw(residual) + place_P, mask=kept_P, other=0))
        if x is not None:
            value_P += widened(tl.load(raw(x) + place_P, mask=kept_P, other=0)) * scale
            stored_P = narrowed(value_P, total.dtype.element_ty)
            tl.store(raw(total) + place_P, stored_P, mask=kept_P & (tl.program_id(0) == 0))
            value_P = widened(stored_P)
        square_P += value_P * value_P
        value_P *= widened(tl.load(raw(norm_weight) + place_P, mask=kept_P, other=0)) + offset
        sum_OP = tl.fma(weight_OP, value_P[None, :], sum_OP)
    root = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(square_P, 0) / size + eps))
    result_O = tl.sum(sum_OP, 1) * root
    if bias is not None:
        result_O += widened(tl.load(raw(bias) + row_O, mask=kept_O, other=0))
    if GELU is not None:
        gate_O, up_O = tl.split(tl.reshape(result_O, (OUTPUTS // 2, 2)))
        result_O = activated(gate_O, GELU) * up_O
        output_O = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        kept_O = output_O < num_outputs // 2
    if heads is None:
        tl.store(raw(out) + output_O, narrowed(result_O, out.dtype.element_ty), mask=kept_O)
    else:
        _rotate_and_store(result_O, out, rotation, turning, num_outputs, heads)


@triton.jit
def _turning(rotation, heads: tl.constexpr, PAIRS: tl.constexpr):
    """Return the cosines and sines of a program's pairs, 1 and 0 of those that are not rotated, and the row's slot."""
    cos, sin, _, _, slots = rotation
    number_P = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    head_P, pair_P = number_P // heads.half, number_P % heads.half
    turns_P = (pair_P < heads.turned) & (head_P < heads.queries + heads.keys)
    cos_P, sin_P = tl.load(cos + pair_P, mask=turns_P, other=1), tl.load(sin + pair_P, mask=turns_P, other=0)
    return cos_P, sin_P, tl.load(slots)


@triton.jit
def _rotate_and_store(result_O, out, rotation, turning, num_outputs, heads: tl.constexpr):
    """Rotate a program's pairs of queries and keys, and store all its pairs: queries in ``out``, the others in the caches."""
    cos_P, sin_P, slot = turning
    _, _, k_cache, v_cache, _ = rotation
    PAIRS: tl.constexpr = result_O.shape[0] // 2
    head_dim: tl.constexpr = 2 * heads.half
    number_P = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    head_P, pair_P = number_P // heads.half, number_P % heads.half
    is_q_P, is_v_P = head_P < heads.queries, head_P >= heads.queries + heads.keys
    first_P, second_P = tl.split(tl.reshape(result_O, (PAIRS, 2)))
    kv_head_P = (head_P - heads.queries) % heads.keys
    block = (slot // heads.page).to(tl.int64) * heads.block_stride
    place_P = block + (kv_head_P * heads.page + slot % heads.page) * head_dim
    cached_P = tl.where(is_v_P, raw(v_cache), raw(k_cache)) + place_P
    target_P = tl.where(is_q_P, raw(out) + head_P * head_dim, cached_P)
    kept_P = (2 * number_P < num_outputs) & (is_q_P | (slot >= 0))
    first_place_P, second_place_P = pair_places(pair_P, heads)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(target_P + first_place_P, narrowed(first_P * cos_P - second_P * sin_P, dtype), mask=kept_P)
    tl.store(target_P + second_place_P, narrowed(second_P * cos_P + first_P * sin_P, dtype), mask=kept_P)
