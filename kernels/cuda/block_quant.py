"""The functions of ``kernels.block_quant`` on a GPU, byte-identical to the reference, in one pass over memory each.

Tensors of other dtypes, sizes or layouts raise ValueError.

In Triton's interpreter (TRITON_INTERPRET=1 before the first import of triton) the same kernels take CPU tensors, so
they can be tested without a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.block_tiles import decode_row, encode_row, stays_rotated
from tightwire.kernels.cuda.launch import launch, wait_for_last
from tightwire.kernels.cuda.numbers import add_tiles, load_tiles, make_tiling, store_tiles
from tightwire.kernels.spec.block_format import BlockFormat
from tightwire.kernels.spec.block_quant import bytes_for, check_message, check_numbers


def encode(x_N: Tensor, fmt: BlockFormat, out: Tensor | None = None, carried_M: Tensor | None = None) -> Tensor:
    check_numbers(x_N, "x_N", x_N.device)
    num_elems = x_N.numel()
    check_carried(carried_M, fmt, num_elems, x_N)
    out = bytes_for(num_elems, fmt, out, x_N.device)
    if num_elems:
        tiling = make_tiling(num_elems, fmt)
        launch(_encode, tiling.num_programs(num_elems), x_N.device, x_N, out, carried_M, num_elems, fmt, tiling)
    return out


def decode(buf: Tensor, fmt: BlockFormat, num_elems: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    check_message(buf, fmt, num_elems, buf.device)
    if out is None:
        out = torch.empty(num_elems, dtype=dtype, device=buf.device)
    check_numbers(out, "out", buf.device)
    if out.dtype != dtype or out.numel() != num_elems:
        raise ValueError(f"out must be {num_elems} numbers of {dtype}, got {out.numel()} of {out.dtype}")
    _launch_decode(buf, fmt, out, adds=False)
    return out


def decode_add(buf: Tensor, fmt: BlockFormat, sum_N: Tensor) -> None:
    num_elems = sum_N.numel()
    check_message(buf, fmt, num_elems, buf.device)
    check_numbers(sum_N, "sum_N", buf.device)
    if sum_N.dtype != torch.float32:
        raise ValueError(f"sum_N must be float32, got {sum_N.dtype}")
    _launch_decode(buf, fmt, sum_N, adds=True)


def _launch_decode(buf: Tensor, fmt: BlockFormat, out_N: Tensor, *, adds: bool) -> None:
    if num_elems := out_N.numel():
        tiling = make_tiling(num_elems, fmt)
        launch(_decode, tiling.num_programs(num_elems), buf.device, buf, out_N, num_elems, fmt, adds, tiling)


def decode_reduce_encode(
    bufs: list[Tensor],
    fmt: BlockFormat,
    out_fmt: BlockFormat,
    num_elems: int,
    out: Tensor | None = None,
    carried_M: Tensor | None = None,
) -> Tensor:
    """Compute ``block_quant.decode_reduce_encode_reference``, into ``out`` if given; the sum stays in registers."""
    if not bufs:
        raise ValueError("decode_reduce_encode needs at least one buffer to add")
    for buf in bufs:
        check_message(buf, fmt, num_elems, bufs[0].device)
    check_carried(carried_M, out_fmt, num_elems, bufs[0])
    out = bytes_for(num_elems, out_fmt, out, bufs[0].device)
    if num_elems:
        tiling = make_tiling(num_elems, fmt, out_fmt)
        given = tuple(bufs), out, carried_M, num_elems, fmt, out_fmt, tiling
        launch(_decode_reduce_encode, tiling.num_programs(num_elems), out.device, *given)
    return out


def check_carried(carried_M: Tensor | None, fmt: BlockFormat | None, num_elems: int, like: Tensor) -> None:
    """Raise ValueError if ``carried_M`` does not hold what encoding ``num_elems`` numbers loses."""
    if carried_M is None:
        return
    least = 0 if fmt is None else fmt.carried_elems(num_elems)
    is_vector = carried_M.dim() == 1 and carried_M.is_contiguous() and carried_M.device == like.device
    if fmt is None or not is_vector or carried_M.dtype != torch.bfloat16 or carried_M.numel() < least:
        raise ValueError(
            f"carried_M must be {least} or more contiguous numbers of bfloat16 on {like.device}, for a format; got "
            f"{tuple(carried_M.shape)} of {carried_M.dtype} on {carried_M.device}"
        )


@triton.jit
def _encode(x, out, carried, num_elems, fmt: tl.constexpr, tiling: tl.constexpr):
    wait_for_last()
    row_B = tl.program_id(0).to(tl.int64) * tiling.rows + tl.arange(0, tiling.rows)
    tiles = load_tiles(x, row_B * tiling.elems, num_elems, tiling)
    encode_row(out, row_B, num_elems, tiles, carried, fmt, False, tiling)


@triton.jit
def _decode(buf, out, num_elems, fmt: tl.constexpr, ADDS: tl.constexpr, tiling: tl.constexpr):
    """Decode to ``out``, or with ADDS add to it."""
    wait_for_last()
    row_B = tl.program_id(0).to(tl.int64) * tiling.rows + tl.arange(0, tiling.rows)
    tiles = decode_row(buf, row_B, num_elems, fmt, False, tiling)
    if ADDS:
        tiles = add_tiles(load_tiles(out, row_B * tiling.elems, num_elems, tiling), tiles)
    store_tiles(out, row_B * tiling.elems, num_elems, tiles, tiling)


@triton.jit
def _decode_reduce_encode(
    bufs, out, carried, num_elems, fmt: tl.constexpr, out_fmt: tl.constexpr, tiling: tl.constexpr
):
    """Decode, add and encode ``bufs``, a tuple of pointers, in its order."""
    wait_for_last()
    row_B = tl.program_id(0).to(tl.int64) * tiling.rows + tl.arange(0, tiling.rows)
    rotated: tl.constexpr = stays_rotated(fmt, out_fmt)
    total = decode_row(bufs[0], row_B, num_elems, fmt, rotated, tiling)
    for i in tl.static_range(1, len(bufs)):
        total = add_tiles(total, decode_row(bufs[i], row_B, num_elems, fmt, rotated, tiling))
    encode_row(out, row_B, num_elems, total, carried, out_fmt, rotated, tiling)
