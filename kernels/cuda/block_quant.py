"""The functions of ``kernels.block_quant``, which checks arguments, on a GPU: the reference's bytes, in one pass over memory each.

In Triton's interpreter (TRITON_INTERPRET=1 before the first import of triton) the same kernels take CPU tensors, so
they can be tested without a GPU.
"""

import triton
import triton.language as tl
from torch import Tensor

from tightwire.kernels.cuda.block_tiles import decode_row, encode_row, stays_rotated
from tightwire.kernels.cuda.launch import launch, wait_for_last
from tightwire.kernels.cuda.numbers import add_tiles, load_tiles, make_tiling, store_tiles
from tightwire.kernels.spec.block_format import BlockFormat


def encode(x_N: Tensor, fmt: BlockFormat, out: Tensor, carried_M: Tensor | None = None) -> None:
    if num_elems := x_N.numel():
        tiling = make_tiling(num_elems, fmt, encodes=True)
        launch(_encode, tiling.num_programs(num_elems), x_N.device, x_N, out, carried_M, num_elems, fmt, tiling)


def decode(buf: Tensor, fmt: BlockFormat, out_N: Tensor, *, adds: bool = False) -> None:
    """``adds``: to ``out_N``, as ``decode_add`` does."""
    if num_elems := out_N.numel():
        tiling = make_tiling(num_elems, fmt)
        launch(_decode, tiling.num_programs(num_elems), buf.device, buf, out_N, num_elems, fmt, adds, tiling)


def decode_reduce_encode(
    bufs: list[Tensor], fmt: BlockFormat, out_fmt: BlockFormat, num_elems: int, out: Tensor, carried_M: Tensor | None
) -> None:
    """Compute ``block_quant.decode_reduce_encode_reference`` into ``out``; the sum stays in registers."""
    if num_elems:
        tiling = make_tiling(num_elems, fmt, out_fmt, encodes=True)
        given = tuple(bufs), out, carried_M, num_elems, fmt, out_fmt, tiling
        launch(_decode_reduce_encode, tiling.num_programs(num_elems), out.device, *given)


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
    tiles = decode_row((buf,), row_B, num_elems, fmt, False, False, tiling)
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
    total = decode_row(bufs, row_B, num_elems, fmt, True, rotated, tiling)
    encode_row(out, row_B, num_elems, total, carried, out_fmt, rotated, tiling)
