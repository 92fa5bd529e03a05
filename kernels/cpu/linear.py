"""Matrix product on CPU whose rows do not know how many they are: numba, float32 accumulation.

torch's product reads the weights at half the memory's speed when there are few rows, and in float32 it gives a row
other bits when it is alone. Here inputs and weights are both read along their rows, as they lie, without packing: an
output is sixteen chains of multiply-adds over the inputs, added in a fixed tree, rounded once. Its bits depend on its
row of x and its row of weights, not on the number of rows or threads.

On CPUs with AVX512-BF16 bfloat16 numbers are multiplied as they are, in pairs; elsewhere they are widened on the way,
or once for all rows when there are many. Packed weights are unpacked on the way for one row, and once for several: the
bits are those that the same numbers would give in float32, or in bfloat16 where bfloat16 is multiplied in pairs.
"""

from typing import Any

import torch
from torch import Tensor

from tightwire.kernels.cpu.packed import is_packed, packed_dot, unpack
from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import helper, kernel, routine
from tightwire.kernels.cpu.vector.numbers import load_numbers, size_of, store_numbers
from tightwire.kernels.cpu.vector.simd import BFLOAT16, FLOAT16, FLOAT32, LANES, NUMBER_KIND
from tightwire.kernels.cpu.vector.simd_tiles_ir import TILES_AHEAD
from tightwire.kernels.cpu.vector.threads import run_on_items
from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.kernels.spec.packed_format import GROUP_ELEMS, PACKED_FORMATS

# Tiles have the shape that keeps their sums in registers: of sixteen floats and 32 of them with AVX-512; else of eight
# and 16 (AVX2), where six sums take twelve, and four are left for what passes by.
_WIDE = simd.has_wide_registers()
_TALL = 4 if _WIDE else 3  # rows of a tile when there are that many, else two or one
_COLUMNS = 4 if _WIDE else 2  # of tiles of more than one row
_SINGLE_COLUMNS = 4
PANEL = 64 if _WIDE else 32  # outputs that a thread takes at a time
_BLOCK = 16 if _WIDE else 32  # of which so many are multiplied with all rows at hand before the next
_MAX_ROWS = 32 if _WIDE else 96  # at hand
_CACHE_BYTES = 96 << 10 if _WIDE else 1 << 22  # of those rows
# From so many rows on 16-bit weights are widened once for all rows instead of once in each tile (not if _WIDE).
_WIDENED_FROM_ROWS = 24
_MAX_WIDENED = 1 << 16  # numbers of a widened block, to stay in the second-level cache; wider rows are not widened

# One thread multiplies with so many weights (with eight rows, or waiting for memory with fewer) in about 100 us.
_WORK_PER_THREAD = 1 << 20

_BF16_PRODUCTS = simd.bf16_products_usable()

_sums = simd.make_stack(_MAX_ROWS * PANEL)
_widened = simd.make_stack(_MAX_WIDENED)


def linear_cpu(x_TD: Tensor, weight_OD: Matrix, bias_O: Tensor | None) -> Tensor:
    """``linear.linear`` for CPU tensors; see there."""
    return _product(x_TD, weight_OD, bias_O, x_TD.dtype)


def linear_to_float_cpu(x_TD: Tensor, weight_OD: Matrix) -> Tensor:
    """``linear.linear_to_float`` for CPU tensors; see there."""
    return _product(x_TD, weight_OD, None, torch.float32)


def _product(x_TD: Tensor, weight_OD: Matrix, bias_O: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """A bias must be of ``out_dtype``."""
    _check(x_TD, weight_OD, bias_O)
    num_tokens, num_inputs = x_TD.shape
    num_outputs = weight_OD.shape[0]
    kind = NUMBER_KIND[out_dtype]
    weight, weight_stride, weight_kind = matrix_integers(weight_OD)
    out_TO = torch.empty((num_tokens, num_outputs), dtype=out_dtype)
    in_pairs = _BF16_PRODUCTS and x_TD.dtype == torch.bfloat16
    if not in_pairs:
        x_TD = x_TD.float()
    max_threads = min(-(-num_outputs // PANEL), useful_threads(num_tokens, num_outputs * num_inputs))
    x_bytes = x_TD.element_size()
    arguments = (
        out_TO.data_ptr(),
        x_TD.data_ptr(),
        x_TD.stride(0) * x_bytes,
        weight,
        weight_stride,
        weight_kind,
        0 if bias_O is None else bias_O.data_ptr(),
        num_tokens,
        num_outputs,
        num_inputs,
        kind,
        in_pairs,
    )
    run_on_items(multiply, arguments, num_outputs, PANEL, max_threads)
    return out_TO


def matrix_integers(weight_OD: Matrix) -> tuple[int, int, int]:
    """How kernels know a matrix: address, bytes from row to row, kind of its numbers or blocks."""
    if isinstance(weight_OD, PackedMatrix):
        return weight_OD.blocks_OB.data_ptr(), weight_OD.blocks_OB.stride(0), weight_OD.format.kind
    return weight_OD.data_ptr(), weight_OD.stride(0) * weight_OD.element_size(), NUMBER_KIND[weight_OD.dtype]


def useful_threads(num_rows: int, num_weights: int) -> int:
    """How many threads are worth waking to multiply so many rows with so many weights, one matrix or several."""
    return 1 + num_weights * (num_rows + 7) // 8 // _WORK_PER_THREAD


def _check(x: Tensor, weight: Matrix, bias: Tensor | None) -> None:
    if x.shape[1] != weight.shape[1] or (bias is not None and bias.shape[0] != weight.shape[0]):
        raise ValueError(
            "linear needs x (T, D), weight (O, D) and bias (O,) or None; "
            f"got {tuple(x.shape)}, {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
        )
    stored = weight.format.name if isinstance(weight, PackedMatrix) else weight.dtype
    if (
        x.dtype not in NUMBER_KIND
        or stored not in (x.dtype, *PACKED_FORMATS)
        or (bias is not None and bias.dtype != x.dtype)
    ):
        raise ValueError(
            f"linear needs x, weight (unless packed) and bias in one of {', '.join(map(str, NUMBER_KIND))}; "
            f"got {x.dtype}, {stored} and {None if bias is None else bias.dtype}"
        )
    strides = weight.blocks_OB.stride() if isinstance(weight, PackedMatrix) else weight.stride()
    if x.stride(1) != 1 or strides[1] != 1 or (bias is not None and bias.stride(0) != 1):
        raise ValueError(f"linear needs contiguous rows; got strides {x.stride()} and {strides}")


def _make_tiles(kind: int) -> Any:
    """A routine that multiplies rows with a block of columns, whose weights are of ``kind`` and read as they lie.

    From memory a CPU with AVX-512 reads fastest what lies in a line, as its prefetchers expect it, so columns are taken
    one by one: a Zen 4 core reads 24 GB/s so with one row, and 16 with four columns and lines asked for ahead of time;
    two cores 25 and 18 (27 and 20 with four rows). With more rows memory would be idle behind the first ones, so these ask for
    the block that follows, and the second ones for what then was too much at once: a Zen 4 core takes 0.7 of the time for
    12 to 32 rows.

    Each tile stands once: they are most of what is compiled.
    """
    near = 0 if _WIDE else TILES_AHEAD
    tall = simd.make_tile_dot(_TALL, _COLUMNS, kind)
    asking = simd.make_tile_dot(
        _TALL, _COLUMNS, kind, tiles_ahead=near or _BLOCK // _COLUMNS, cache_level=2 if _WIDE else 1
    )
    pair = simd.make_tile_dot(2, _COLUMNS, kind, tiles_ahead=near)
    single = simd.make_tile_dot(1, _SINGLE_COLUMNS, kind, tiles_ahead=near)
    tall_1, pair_1, single_1 = (simd.make_tile_dot(rows, 1, kind) for rows in (_TALL, 2, 1))

    @routine
    def multiply(
        sums: int,
        x: int,
        x_stride: int,
        rows: int,
        weights: int,
        weight_stride: int,
        columns: int,
        depth: int,
        fresh: bool,
        asks: bool,
    ) -> None:
        stride = 4 * PANEL
        row = 0
        while row < rows:
            step = _tile_rows(rows - row)
            c, a = sums + stride * row, x + x_stride * row
            width = _COLUMNS if step > 1 else _SINGLE_COLUMNS
            whole = 0 if _WIDE and fresh and row == 0 else columns // width * width
            for at in range(0, whole, width):
                b = weights + weight_stride * at
                if step == 1:
                    single(c + 4 * at, stride, a, x_stride, b, weight_stride, depth)
                elif step == 2:
                    pair(c + 4 * at, stride, a, x_stride, b, weight_stride, depth)
                elif asks and row <= _TALL:
                    asking(c + 4 * at, stride, a, x_stride, b, weight_stride, depth)
                else:
                    tall(c + 4 * at, stride, a, x_stride, b, weight_stride, depth)
            for at in range(whole, columns):
                b = weights + weight_stride * at
                if step == 1:
                    single_1(c + 4 * at, stride, a, x_stride, b, weight_stride, depth)
                elif step == 2:
                    pair_1(c + 4 * at, stride, a, x_stride, b, weight_stride, depth)
                else:
                    tall_1(c + 4 * at, stride, a, x_stride, b, weight_stride, depth)
            row += step

    return multiply


@helper
def _tile_rows(left: int) -> int:
    """Of the next tile: as many as it can have, and never so that a single one is left where pairs would do."""
    return _TALL if left >= _TALL and (_WIDE or left != 4) else min(left, 2)


_float_tiles, _bf16_tiles, _f16_tiles = (_make_tiles(kind) for kind in (FLOAT32, BFLOAT16, FLOAT16))


@kernel
def multiply(
    out: int,
    x: int,
    x_stride: int,
    weight: int,
    weight_stride: int,
    weight_kind: int,
    bias: int,
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    kind: int,
    in_pairs: bool,
    start: int,
    stop: int,
) -> None:
    """Outputs ``start`` to ``stop`` of each token, panel after panel.

    Strides are bytes. ``x`` is as ``prepare_rows`` leaves it: bfloat16 ``in_pairs``, else float32. ``out`` and ``bias`` are
    of ``kind``; weights are as ``weight_kind`` says.
    """
    x_bytes = 2 if in_pairs else 4
    rows_at_once = _rows_at_once(num_tokens, x_bytes * num_inputs)
    sums, widened = _sums(), _widened()
    size = size_of(kind)
    for first in range(start, stop, PANEL):
        outputs = min(PANEL, stop - first)
        for token in range(0, num_tokens, rows_at_once):
            rows = min(rows_at_once, num_tokens - token)
            for column in range(0, outputs, _BLOCK):
                _dot(
                    sums + 4 * column,
                    x + x_stride * token,
                    x_stride,
                    rows,
                    weight + weight_stride * (first + column),
                    weight_stride,
                    min(_BLOCK, outputs - column),
                    num_inputs,
                    weight_kind,
                    in_pairs,
                    widened,
                    column == 0,
                )
            for row in range(rows):
                target = out + size * ((token + row) * num_outputs + first)
                for at in range(0, outputs, LANES):
                    value = simd.load(sums + 4 * (row * PANEL + at))
                    if bias != 0:
                        value = simd.add(value, load_numbers(bias + size * (first + at), kind, outputs - at))
                    store_numbers(target + size * at, value, kind, outputs - at)


@helper
def come_in_pairs(kind: int) -> bool:
    """Whether rows of ``kind`` are multiplied two numbers at once."""
    return _BF16_PRODUCTS and kind == BFLOAT16


@helper
def prepare_rows(x: int, num_rows: int, depth: int, kind: int, scratch: int) -> tuple[int, int]:
    """Address and stride of contiguous rows as ``multiply`` reads them: as they are, or in float32 in ``scratch``."""
    if kind == FLOAT32 or come_in_pairs(kind):
        return x, depth * size_of(kind)
    for row in range(num_rows):
        for at in range(0, depth, LANES):
            numbers = load_numbers(x + size_of(kind) * (row * depth + at), kind, depth - at)
            store_numbers(scratch + 4 * (row * depth + at), numbers, FLOAT32, depth - at)
    return scratch, 4 * depth


@helper
def _rows_at_once(num_rows: int, row_bytes: int) -> int:
    """As many as are kept at hand, in turns of about as many each: a last turn of one row would be a slow one."""
    most = max(_TALL, min(_MAX_ROWS, _CACHE_BYTES // (row_bytes + 1)) // _TALL * _TALL)
    turns = (num_rows + most - 1) // most
    if turns < 2:
        return most
    return (num_rows + turns * _TALL - 1) // (turns * _TALL) * _TALL


@helper
def _dot(
    sums: int,
    x: int,
    x_stride: int,
    rows: int,
    weights: int,
    weight_stride: int,
    columns: int,
    depth: int,
    kind: int,
    in_pairs: bool,
    widened: int,
    first: bool,
) -> None:
    """A block of columns of sums (rows, PANEL) = x (rows, depth) @ weights (columns, depth)^T, the panel's ``first`` or not."""
    # A gap behind each row: rows of whole pages would all meet in the same few places of the cache.
    words = (depth + 1) // 2 if in_pairs else depth
    stride = 4 * LANES * ((words + 2 * LANES - 1) // LANES)
    fitting = 4 * _MAX_WIDENED // stride
    if is_packed(kind) and (rows == 1 or fitting == 0):
        for row in range(rows):
            c, a = sums + 4 * PANEL * row, x + x_stride * row
            packed_dot(c, a, weights, weight_stride, columns, depth // GROUP_ELEMS, kind, in_pairs)
        return
    if is_packed(kind):
        for column in range(0, columns, fitting):
            some = min(fitting, columns - column)
            for at in range(some):
                source = weights + weight_stride * (column + at)
                unpack(widened + stride * at, source, depth // GROUP_ELEMS, kind, in_pairs)
            unpacked_kind = BFLOAT16 if in_pairs else FLOAT32
            _tiles(sums + 4 * column, x, x_stride, rows, widened, stride, some, depth, unpacked_kind, False, False)
        return
    fresh, asks = first or rows <= _TALL, True
    if not _WIDE and kind != FLOAT32 and rows >= _WIDENED_FROM_ROWS and columns <= fitting:
        _widen(widened, stride, weights, weight_stride, columns, depth, kind)
        weights, weight_stride, kind, fresh, asks = widened, stride, FLOAT32, False, False
    _tiles(sums, x, x_stride, rows, weights, weight_stride, columns, depth, kind, fresh, asks)


@helper
def _tiles(
    sums: int,
    x: int,
    x_stride: int,
    rows: int,
    weights: int,
    weight_stride: int,
    columns: int,
    depth: int,
    kind: int,
    fresh: bool,
    asks: bool,
) -> None:
    """``_dot`` with weights that are read as they lie; ``fresh``: from memory, ``asks``: and so will be those behind them."""
    if kind == BFLOAT16:
        _bf16_tiles(sums, x, x_stride, rows, weights, weight_stride, columns, depth, fresh, asks)
    elif kind == FLOAT16:
        _f16_tiles(sums, x, x_stride, rows, weights, weight_stride, columns, depth, fresh, asks)
    else:
        _float_tiles(sums, x, x_stride, rows, weights, weight_stride, columns, depth, fresh, asks)


@helper
def _widen(target: int, target_stride: int, source: int, source_stride: int, rows: int, depth: int, kind: int) -> None:
    """Rows of numbers of ``kind`` as float32; what stands behind a row's last number is of no use."""
    for row in range(rows):
        at_source, at_target = source + source_stride * row, target + target_stride * row
        for at in range(0, depth, LANES):
            simd.store(at_target + 4 * at, load_numbers(at_source + 2 * at, kind, depth - at))
