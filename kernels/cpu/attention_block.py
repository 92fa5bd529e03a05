"""CPU attention of one block of keys and a tile of query rows: scores, their softmax, the values' sum.

Addresses, not tensors; ``attention_cpu_kernels`` walks tiles and blocks, and says how numbers lie.
"""

import math
from typing import Any

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import helper, routine
from tightwire.kernels.cpu.vector.numbers import load_numbers, size_of, store_narrow, store_numbers
from tightwire.kernels.cpu.vector.simd import LANES

KEYS = 64  # keys per block: four vectors of scores per row

ROW_BYTES = 4 * KEYS
VECTOR_BYTES = 4 * LANES
MINUS_INFINITY = -math.inf
PAIRS = simd.bf16_products_usable()

# Tiles whose sums stay in registers: of sixteen floats and 32 of them with AVX-512; else eight and 16 (AVX2).
_WIDE = simd.has_wide_registers()
TALL = 4 if _WIDE else 6  # rows of a tile when there are that many, else four, two or one
_VECTORS = {1: 4, 2: 4, 4: 4} if _WIDE else {1: 4, 2: 2, 4: 1, 6: 1}  # of sixteen columns, by rows


def _make_products(columns: int, *, accumulate: bool, pairs: bool = False) -> Any:
    """A routine for ``c = a @ b`` or ``c += a @ b``, of ``columns`` columns and any number of rows."""
    tiles = {
        rows: simd.make_tile_product(rows, min(vectors, columns // LANES), accumulate=accumulate, pairs=pairs)
        for rows, vectors in _VECTORS.items()
    }
    one, two, four, tall = tiles[1], tiles[2], tiles[4], tiles[TALL]
    step_1, step_2, step_4, step = (LANES * min(_VECTORS[rows], columns // LANES) for rows in (1, 2, 4, TALL))

    @routine
    def product(c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int, rows: int, depth: int) -> None:
        if rows == 1:
            for at in range(0, 4 * columns, 4 * step_1):
                one(c + at, c_stride, a, a_stride, b + at, b_stride, depth)
        elif rows == 2:
            for at in range(0, 4 * columns, 4 * step_2):
                two(c + at, c_stride, a, a_stride, b + at, b_stride, depth)
        elif rows <= 4:
            for at in range(0, 4 * columns, 4 * step_4):
                four(c + at, c_stride, a, a_stride, b + at, b_stride, depth)
        else:
            for at in range(0, 4 * columns, 4 * step):
                for row in range(0, rows, TALL):
                    tall(c + c_stride * row + at, c_stride, a + a_stride * row, a_stride, b + at, b_stride, depth)

    return product


_scores = _make_products(KEYS, accumulate=False)
_values = _make_products(KEYS, accumulate=True)
_values_narrow = _make_products(LANES, accumulate=True)
_pair_scores = _make_products(KEYS, accumulate=False, pairs=PAIRS)
_pair_values = _make_products(KEYS, accumulate=True, pairs=PAIRS)
_pair_values_narrow = _make_products(LANES, accumulate=True, pairs=PAIRS)


@helper
def widen(source: int, kind: int, count: int, target: int) -> None:
    """``count`` numbers of ``kind`` become float32; ``target`` has room for whole vectors."""
    size = size_of(kind)
    for at in range(0, count, LANES):
        simd.store(target + 4 * at, load_numbers(source + size * at, kind, count - at))


@helper
def copy(source: int, count: int, padded: int, target: int) -> None:
    """``count`` 16-bit numbers, and zeros up to ``padded``."""
    whole = count // (2 * LANES) * (2 * LANES)
    for at in range(0, whole, 2 * LANES):
        simd.store(target + 2 * at, simd.load(source + 2 * at))
    if whole < count:
        for at in range(2 * whole, 2 * padded, 8):
            simd.store_i64(target + at, 0)
        simd.copy_bytes(target + 2 * whole, source + 2 * whole, 2 * (count - whole))


@helper
def pair_up(rows: int, padded: int, target: int) -> None:
    """Eight rows of pairs from sixteen of 16-bit numbers, each with the one that follows it; all strides 4 * padded."""
    stride = 4 * padded
    for row in range(0, LANES, 2):
        source = rows + stride * row
        for at in range(0, padded, LANES):
            simd.interleave(source + 2 * at, source + stride + 2 * at, target + stride * (row // 2) + 4 * at)


@helper
def narrow_quotient(source: int, divisor: simd.Vector, kind: int, count: int, target: int) -> None:
    """``source / divisor``, rounded once to ``kind``."""
    size = size_of(kind)
    for at in range(0, count, LANES):
        store_numbers(target + size * at, simd.div(simd.load(source + 4 * at), divisor), kind, count - at)


@helper
def clear(address: int, count: int) -> None:
    for at in range(0, 4 * count, VECTOR_BYTES):
        simd.store(address + at, simd.splat(0.0))


@helper
def score(scores: int, queries: int, keys_t: int, rows: int, padded: int, head_dim: int, in_pairs: bool) -> None:
    """scores (rows, 64) = queries (rows, padded) @ keys, transposed."""
    if in_pairs:
        _pair_scores(scores, ROW_BYTES, queries, 4 * padded, keys_t, ROW_BYTES, rows, padded // 2)
    else:
        _scores(scores, ROW_BYTES, queries, 4 * padded, keys_t, ROW_BYTES, rows, head_dim)


@helper
def mix(sums: int, weights: int, values: int, rows: int, padded: int, in_pairs: bool) -> None:
    """sums (rows, padded) += weights (rows, 64) @ values."""
    stride = 4 * padded
    wide_columns = padded // KEYS * KEYS
    for column in range(0, wide_columns, KEYS):
        if in_pairs:
            _pair_values(sums + 4 * column, stride, weights, ROW_BYTES, values + 4 * column, stride, rows, KEYS // 2)
        else:
            _values(sums + 4 * column, stride, weights, ROW_BYTES, values + 4 * column, stride, rows, KEYS)
    for column in range(wide_columns, padded, LANES):
        at, b = sums + 4 * column, values + 4 * column
        if in_pairs:
            _pair_values_narrow(at, stride, weights, ROW_BYTES, b, stride, rows, KEYS // 2)
        else:
            _values_narrow(at, stride, weights, ROW_BYTES, b, stride, rows, KEYS)


@helper
def soften(
    scores: int,
    sums: int,
    lane_sums: int,
    maximum: int,
    visible: int,
    padded: int,
    scale: float,
    in_pairs: bool,
) -> None:
    """One row's step of the online softmax over 64 scores, of which the first ``visible`` count; p replaces them.

    ``in_pairs``: p is stored in bfloat16, in the first half of the row.
    """
    if visible <= 0:
        clear(scores, KEYS)
        return
    s0 = simd.load(scores)
    s1 = simd.load(scores + VECTOR_BYTES)
    s2 = simd.load(scores + 2 * VECTOR_BYTES)
    s3 = simd.load(scores + 3 * VECTOR_BYTES)
    if in_pairs:
        factor = simd.splat(scale)
        s0, s1, s2, s3 = simd.mul(s0, factor), simd.mul(s1, factor), simd.mul(s2, factor), simd.mul(s3, factor)
    if visible < KEYS:
        s0 = simd.keep_first(s0, visible, MINUS_INFINITY)
        s1 = simd.keep_first(s1, visible - LANES, MINUS_INFINITY)
        s2 = simd.keep_first(s2, visible - 2 * LANES, MINUS_INFINITY)
        s3 = simd.keep_first(s3, visible - 3 * LANES, MINUS_INFINITY)
    old = simd.load_scalar(maximum)
    highest = simd.max_lanes(simd.maximum(simd.maximum(s0, s1), simd.maximum(s2, s3)))
    new, shrink = simd.splat(old), simd.splat(1.0)
    if not highest <= old:  # rarely, behind the first blocks; a NaN goes on
        new = simd.splat(highest)
        shrink = simd.exp2(simd.sub(simd.splat(old), new))
        simd.store_scalar(maximum, highest)
        for at in range(0, 4 * padded, VECTOR_BYTES):
            simd.store(sums + at, simd.mul(simd.load(sums + at), shrink))
    p0 = simd.exp2(simd.sub(s0, new))
    p1 = simd.exp2(simd.sub(s1, new))
    p2 = simd.exp2(simd.sub(s2, new))
    p3 = simd.exp2(simd.sub(s3, new))
    if in_pairs:
        store_narrow(scores, p0)
        store_narrow(scores + VECTOR_BYTES // 2, p1)
        store_narrow(scores + VECTOR_BYTES, p2)
        store_narrow(scores + 3 * VECTOR_BYTES // 2, p3)
    else:
        simd.store(scores, p0)
        simd.store(scores + VECTOR_BYTES, p1)
        simd.store(scores + 2 * VECTOR_BYTES, p2)
        simd.store(scores + 3 * VECTOR_BYTES, p3)
    total = simd.add(simd.add(p0, p1), simd.add(p2, p3))
    simd.store(lane_sums, simd.fma(simd.load(lane_sums), shrink, total))
