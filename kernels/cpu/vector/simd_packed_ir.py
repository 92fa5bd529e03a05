"""LLVM code for packed matrices (``packed_format``): a block's numbers in registers, a row's in memory, and products.

Numbers are made by the same instructions in all of them, so a product with what was unpacked before has the same bits as
one that unpacks on the way.
"""

from collections.abc import Iterator

from llvmlite import ir
from numba.core import cgutils

from tightwire.kernels.cpu.vector.simd_ir import (
    F32,
    I32,
    I64,
    LANES,
    V_F32,
    V_I16,
    Builder,
    Emit,
    Value,
    fma,
    keep_reads_below,
    load_as,
    load_floats,
    load_pairs,
    looked_up,
    multiply_add_pairs,
    narrowed,
    narrowed_pairs,
    prefetch,
    store_as,
    table_of,
)
from tightwire.kernels.cpu.vector.simd_tiles_ir import LINE_BYTES, TILES_AHEAD, fold_together, joined, moved
from tightwire.kernels.spec.packed_format import GROUP_ELEMS, PackedFormat

_GROUP_BYTES = 4 * GROUP_ELEMS  # of float32 numbers
_PAIRS_BYTES = 2 * GROUP_ELEMS  # of bfloat16 numbers
_I8 = ir.IntType(8)


def _at(builder: Builder, address: Value, num_bytes: int) -> Value:
    return builder.add(address, ir.Constant(I64, num_bytes))


def _header(builder: Builder, address: Value, lanes: int) -> tuple[Value, Value]:
    """The block's first two float16, each in all lanes; the second is a minimum, or codes and of no use.

    Read as one integer: a float16 by itself LLVM puts into a register that something else waits for.
    """
    halves = builder.bitcast(load_as(I32, 2)(builder, address), ir.VectorType(ir.HalfType(), 2))
    pair = builder.fpext(halves, ir.VectorType(F32, 2))
    first, second = (ir.Constant(ir.VectorType(I32, lanes), [place] * lanes) for place in (0, 1))
    return builder.shuffle_vector(pair, pair, first), builder.shuffle_vector(pair, pair, second)


def _codes(builder: Builder, address: Value, bits: int, lanes: int) -> Iterator[tuple[int, Value]]:
    """First number and int32 codes of each ``lanes`` of a group, those of the same sixteen lanes one after the other."""
    wide = ir.VectorType(I32, lanes)
    load = load_as(ir.VectorType(_I8, lanes), 1)
    for first in range(0, LANES, lanes):
        if bits == 8:
            for half in (0, LANES):
                yield half + first, builder.sext(load(builder, _at(builder, address, half + first)), wide)
        else:
            pairs = builder.zext(load(builder, _at(builder, address, first)), wide)
            yield first, builder.and_(pairs, ir.Constant(wide, [15] * lanes))
            yield LANES + first, builder.lshr(pairs, ir.Constant(wide, [4] * lanes))


def block_numbers(builder: Builder, address: Value, packed: PackedFormat, lanes: int) -> Iterator[tuple[int, Value]]:
    """Which number of the group is the first, and the vector, for each ``lanes`` numbers of the block at ``address``.

    Code is written as the vectors are asked for: what uses one stands before what makes the next.
    """
    scale, minimum = _header(builder, address, lanes)
    for first, codes in _codes(builder, _at(builder, address, packed.header_bytes), packed.bits, lanes):
        if packed.bits == 4 and not packed.has_minimum:
            codes = builder.sub(codes, ir.Constant(codes.type, [8] * lanes))
        numbers = builder.sitofp(codes, scale.type)
        yield first, fma(builder, numbers, scale, minimum) if packed.has_minimum else builder.fmul(numbers, scale)


def block_pairs(builder: Builder, address: Value, packed: PackedFormat) -> Value:
    """The 32 numbers of the block at ``address`` rounded to bfloat16, as ``load_pairs`` would give them.

    Four bits make sixteen numbers, which are computed once and then looked up: a third fewer instructions.
    """
    if packed.bits == 8:
        (_, first), (_, second) = block_numbers(builder, address, packed, LANES)
        return narrowed_pairs(builder, first, second)
    scale, minimum = _header(builder, address, LANES)
    if packed.has_minimum:
        numbers = fma(builder, ir.Constant(V_F32, [float(code) for code in range(LANES)]), scale, minimum)
    else:
        numbers = builder.fmul(ir.Constant(V_F32, [float(code - 8) for code in range(LANES)]), scale)
    stored = load_as(ir.VectorType(_I8, LANES), 1)(builder, _at(builder, address, packed.header_bytes))
    low = builder.zext(stored, V_I16)
    high = builder.lshr(low, ir.Constant(V_I16, [4] * LANES))
    places = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * LANES), [*range(2 * LANES)]))
    return looked_up(builder, table_of(builder, narrowed(builder, numbers)), places)


def unpack(packed: PackedFormat, lanes: int, *, pairs: bool) -> Emit:
    """Code for ``simd.make_unpack``."""

    def emit(builder: Builder, target: Value, source: Value, num_groups: Value) -> None:
        with cgutils.for_range(builder, num_groups) as loop:
            block = moved(builder, source, loop.index, packed.block_bytes)
            if pairs:
                out = moved(builder, target, loop.index, _PAIRS_BYTES)
                store_as(V_F32, 4)(builder, out, block_pairs(builder, block, packed))
                return
            out = moved(builder, target, loop.index, _GROUP_BYTES)
            for first, numbers in block_numbers(builder, block, packed, lanes):
                store_as(numbers.type, 4)(builder, _at(builder, out, 4 * first), numbers)

    return emit


def packed_dot(num_columns: int, packed: PackedFormat, lanes: int, *, pairs: bool) -> Emit:
    """Code for ``simd.make_packed_dot``. Memory is asked for ahead of time as by ``tile_dot``, which see."""
    group_bytes = _PAIRS_BYTES if pairs else _GROUP_BYTES

    def emit(builder: Builder, c: Value, a: Value, b: Value, b_stride: Value, num_groups: Value) -> None:
        num_parts = LANES // lanes
        zeros = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
        cells = [(column, part) for column in range(num_columns) for part in range(num_parts)]
        sums = {cell: cgutils.alloca_once(builder, zeros.type) for cell in cells}
        for place in sums.values():
            builder.store(zeros, place)
        b_rows = [moved(builder, b, b_stride, column) for column in range(num_columns)]
        ahead = moved(builder, b, b_stride, TILES_AHEAD * num_columns)
        with cgutils.for_range(builder, num_groups) as loop:
            a_group = moved(builder, a, loop.index, group_bytes)
            b_at = builder.mul(loop.index, ir.Constant(I64, packed.block_bytes))
            asked = moved(builder, ahead, b_at, num_columns)
            for line in range(0, num_columns * packed.block_bytes, LINE_BYTES):
                prefetch(builder, _at(builder, asked, line))
            for column, b_row in enumerate(b_rows):
                if pairs:
                    numbers, place = block_pairs(builder, builder.add(b_row, b_at), packed), sums[column, 0]
                    total = multiply_add_pairs(builder, load_pairs(builder, a_group), numbers, builder.load(place))
                    builder.store(total, place)
                    continue
                for first, numbers in block_numbers(builder, builder.add(b_row, b_at), packed, lanes):
                    a_numbers = load_floats(lanes)(builder, _at(builder, a_group, 4 * first))
                    place = sums[column, first % LANES // lanes]
                    builder.store(fma(builder, a_numbers, numbers, builder.load(place)), place)
                if num_parts > 1:
                    keep_reads_below(builder)
        totals = [
            joined(builder, [builder.load(sums[column, part]) for part in range(num_parts)])
            for column in range(num_columns)
        ]
        folded = fold_together(builder, totals)
        kept = ir.Constant(ir.VectorType(I32, num_columns), list(range(num_columns)))
        store_as(ir.VectorType(F32, num_columns), 4)(builder, c, builder.shuffle_vector(folded, folded, kept))

    return emit
