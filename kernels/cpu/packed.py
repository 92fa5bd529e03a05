"""Packed matrices on CPU: rows unpacked to floats, and one row multiplied with packed ones on the way from memory.

``in_pairs``: to bfloat16 numbers, as they are beside a row of bfloat16 where the CPU multiplies these in pairs.
"""

from typing import Any

from tightwire.kernels.cpu.vector import simd
from tightwire.kernels.cpu.vector.jit import helper, kernel, routine
from tightwire.kernels.cpu.vector.numbers import size_of, store_numbers
from tightwire.kernels.cpu.vector.simd import FLOAT32, LANES
from tightwire.kernels.spec.packed_format import GROUP_ELEMS, PACKED_FORMATS, PackedFormat

_COLUMNS = 4  # packed rows that are multiplied at a time

# Constants of kernels.
_Q8_0, _Q4_0, _Q4_1 = (packed.kind for packed in PACKED_FORMATS.values())
_Q8_0_BYTES, _Q4_0_BYTES, _Q4_1_BYTES = (packed.block_bytes for packed in PACKED_FORMATS.values())
_FIRST_KIND = min(packed.kind for packed in PACKED_FORMATS.values())

_PAIRS = simd.bf16_products_usable()

_group = simd.make_stack(GROUP_ELEMS)


def _make_dot(packed: PackedFormat, *, pairs: bool = False) -> Any:
    several, one = (simd.make_packed_dot(columns, packed, pairs=pairs) for columns in (_COLUMNS, 1))

    @routine
    def dot(sums: int, x: int, weights: int, weight_stride: int, columns: int, num_groups: int) -> None:
        whole = columns // _COLUMNS * _COLUMNS
        for at in range(0, whole, _COLUMNS):
            several(sums + 4 * at, x, weights + weight_stride * at, weight_stride, num_groups)
        for at in range(whole, columns):
            one(sums + 4 * at, x, weights + weight_stride * at, weight_stride, num_groups)

    return dot


def _make_unpack(packed: PackedFormat, *, pairs: bool = False) -> Any:
    row = simd.make_unpack(packed, pairs=pairs)

    @routine
    def unpack(target: int, source: int, num_groups: int) -> None:
        row(target, source, num_groups)

    return unpack


_formats = PACKED_FORMATS.values()
_dots = [_make_dot(packed) for packed in _formats]
_unpacks = [_make_unpack(packed) for packed in _formats]
_dot_q8_0, _dot_q4_0, _dot_q4_1 = _dots
_unpack_q8_0, _unpack_q4_0, _unpack_q4_1 = _unpacks
# Without pairs these are never called, but must be there to compile: the others, so that nothing is compiled twice.
_pairs_q8_0, _pairs_q4_0, _pairs_q4_1 = [_make_dot(packed, pairs=True) for packed in _formats] if _PAIRS else _dots
_unpack_pairs_q8_0, _unpack_pairs_q4_0, _unpack_pairs_q4_1 = (
    [_make_unpack(packed, pairs=True) for packed in _formats] if _PAIRS else _unpacks
)


@helper
def is_packed(kind: int) -> bool:
    return kind >= _FIRST_KIND


@helper
def packed_dot(
    sums: int, x: int, weights: int, weight_stride: int, columns: int, num_groups: int, kind: int, in_pairs: bool
) -> None:
    """sums (columns,) = one row of float32, or bfloat16 ``in_pairs``, @ packed weights (columns, groups)^T."""
    if in_pairs:
        if kind == _Q8_0:
            _pairs_q8_0(sums, x, weights, weight_stride, columns, num_groups)
        elif kind == _Q4_0:
            _pairs_q4_0(sums, x, weights, weight_stride, columns, num_groups)
        else:
            _pairs_q4_1(sums, x, weights, weight_stride, columns, num_groups)
    elif kind == _Q8_0:
        _dot_q8_0(sums, x, weights, weight_stride, columns, num_groups)
    elif kind == _Q4_0:
        _dot_q4_0(sums, x, weights, weight_stride, columns, num_groups)
    else:
        _dot_q4_1(sums, x, weights, weight_stride, columns, num_groups)


@helper
def unpack(target: int, source: int, num_groups: int, kind: int, in_pairs: bool) -> None:
    """Groups that follow each other as float32, or bfloat16 ``in_pairs``."""
    if in_pairs:
        if kind == _Q8_0:
            _unpack_pairs_q8_0(target, source, num_groups)
        elif kind == _Q4_0:
            _unpack_pairs_q4_0(target, source, num_groups)
        else:
            _unpack_pairs_q4_1(target, source, num_groups)
    elif kind == _Q8_0:
        _unpack_q8_0(target, source, num_groups)
    elif kind == _Q4_0:
        _unpack_q4_0(target, source, num_groups)
    else:
        _unpack_q4_1(target, source, num_groups)


@kernel
def unpack_rows(
    out: int, out_kind: int, kind: int, blocks: int, row_stride: int, num_groups: int, start: int, stop: int
) -> None:
    """Rows ``start`` to ``stop`` as numbers of ``out_kind``, contiguous in ``out``; ``row_stride`` is bytes."""
    row_bytes = size_of(out_kind) * GROUP_ELEMS * num_groups
    block_bytes = _Q8_0_BYTES if kind == _Q8_0 else _Q4_0_BYTES if kind == _Q4_0 else _Q4_1_BYTES
    group = _group()
    for row in range(start, stop):
        target, source = out + row_bytes * row, blocks + row_stride * row
        if out_kind == FLOAT32:
            unpack(target, source, num_groups, kind, False)
        else:
            for at in range(num_groups):
                unpack(group, source + block_bytes * at, 1, kind, False)
                place = target + size_of(out_kind) * GROUP_ELEMS * at
                store_numbers(place, simd.load(group), out_kind, LANES)
                store_numbers(place + size_of(out_kind) * LANES, simd.load(group + 4 * LANES), out_kind, LANES)
