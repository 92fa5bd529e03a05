"""LLVM code for the blocks of ``simd`` that keep a tile of sums in registers: products, and what adds up their lanes."""

from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from tightwire.kernels.cpu.vector.simd_ir import (
    F32,
    I32,
    I64,
    LANES,
    V_F32,
    V_I32,
    Builder,
    Emit,
    Value,
    constant,
    keep_reads_below,
    load_as,
    load_part,
    prefetch,
    splat,
    store_as,
)


def _cells(num_rows: int, num_columns: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(num_rows) for column in range(num_columns)]


def moved(builder: Builder, base: Value, stride: Value, count: int) -> Value:
    """The address ``count`` strides behind ``base``."""
    return builder.add(base, builder.mul(stride, ir.Constant(I64, count)))


def tile_product(num_rows: int, num_vectors: int, accumulate: bool, step: Emit) -> Emit:
    """Code for ``simd.make_tile_product``: ``step(a, b, sum)`` is what a lane adds, of 32 bits in a and in b."""

    def emit(
        builder: Builder, c: Value, c_stride: Value, a: Value, a_stride: Value, b: Value, b_stride: Value, depth: Value
    ) -> None:
        cells = _cells(num_rows, num_vectors)
        vector_bytes = ir.Constant(I64, 4 * LANES)
        places = {(row, vec): moved(builder, moved(builder, c, c_stride, row), vector_bytes, vec) for row, vec in cells}
        sums = {cell: cgutils.alloca_once(builder, V_F32) for cell in cells}
        for cell in cells:
            start = load_as(V_F32, 4)(builder, places[cell]) if accumulate else constant(0.0, V_F32)
            builder.store(start, sums[cell])
        with cgutils.for_range(builder, depth) as loop:
            b_row = builder.add(b, builder.mul(b_stride, loop.index))
            a_column = builder.add(a, builder.mul(ir.Constant(I64, 4), loop.index))
            vectors = [load_as(V_F32, 4)(builder, moved(builder, b_row, vector_bytes, i)) for i in range(num_vectors)]
            scalars = [load_as(F32, 4)(builder, moved(builder, a_column, a_stride, row)) for row in range(num_rows)]
            factors = [splat(builder, scalar) for scalar in scalars]
            for row, vec in cells:
                total = builder.load(sums[row, vec])
                builder.store(step(builder, factors[row], vectors[vec], total), sums[row, vec])
        for cell in cells:
            store_as(V_F32, 4)(builder, places[cell], builder.load(sums[cell]))

    return emit


def fold_together(builder: Builder, vectors: list[Value]) -> Value:
    """One vector whose lane i is the sum over the lanes of ``vectors[i]``, of which there are up to 16.

    Each is summed in the same tree: lanes eight apart, then four, two, one. Two vectors share every addition.
    """
    wanted = 1 << (len(vectors) - 1).bit_length()
    vectors = [*vectors, *vectors[: wanted - len(vectors)]]  # pairs all the way down
    blocks = 1  # sums that a vector holds, side by side
    while blocks < LANES:
        half = LANES // blocks // 2
        lower = [block * 2 * half + lane for block in range(blocks) for lane in range(half)]
        low = [*lower, *(lane + LANES for lane in lower)]
        low_mask = ir.Constant(V_I32, low)
        high_mask = ir.Constant(V_I32, [lane + half for lane in low])
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, low_mask), builder.shuffle_vector(a, b, high_mask))
            for a, b in pairs
        ]
        blocks *= 2
    return vectors[0]


# How many tiles ahead of the one at hand memory is asked for, where each is read from there.
TILES_AHEAD = 2
LINE_BYTES = 64


def tile_dot(
    num_rows: int,
    num_columns: int,
    load_a: Callable[[int], Emit],
    load_b: Callable[[int], Emit],
    step: Emit,
    width: int,
    sizes: tuple[int, int],
    *,
    lanes: int,
    tiles_ahead: int,
    cache_level: int,
) -> Emit:
    """Code for ``simd.make_tile_dot``; a step takes ``width`` numbers of ``sizes`` bytes in a and b.

    ``lanes``: so many, of the sixteen, make their step before the others do: those of a register where the sums leave
    few to hold what was read. ``load_a`` and ``load_b`` give the code that loads so many.

    ``tiles_ahead``: b's rows follow each other without gaps, and those so many tiles further on are asked for, into the cache
    of ``cache_level``, line after line in the order of their addresses (0: they are not). With one row in a, a Zen 3 core
    reads bfloat16 at 16 GB/s so, with two tiles; at 10 without, and at 11 with the lines in the order in which a tile
    reads them.
    """

    def emit(
        builder: Builder, c: Value, c_stride: Value, a: Value, a_stride: Value, b: Value, b_stride: Value, depth: Value
    ) -> None:
        cells = _cells(num_rows, num_columns)
        zeros = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
        parts = range(LANES // lanes)
        sums = {(cell, part): cgutils.alloca_once_value(builder, zeros) for cell in cells for part in parts}
        for place in sums.values():
            builder.store(zeros, place)
        a_rows = [moved(builder, a, a_stride, row) for row in range(num_rows)]
        b_rows = [moved(builder, b, b_stride, column) for column in range(num_columns)]
        ahead = moved(builder, b, b_stride, tiles_ahead * num_columns)
        step_lines = num_columns * width * sizes[1] // LINE_BYTES

        def ask_ahead(b_at: Value) -> None:
            asked = builder.add(ahead, builder.mul(b_at, ir.Constant(I64, num_columns)))
            for line in range(step_lines):
                prefetch(builder, builder.add(asked, ir.Constant(I64, LINE_BYTES * line)), cache_level)

        def add_part(part: int, a_at: Value, b_at: Value) -> None:
            first = part * width // len(parts)
            a_at = builder.add(a_at, ir.Constant(I64, first * sizes[0]))
            b_at = builder.add(b_at, ir.Constant(I64, first * sizes[1]))
            a_vectors = [load_a(lanes)(builder, builder.add(row, a_at)) for row in a_rows]
            for column, b_row in enumerate(b_rows):
                b_vector = load_b(lanes)(builder, builder.add(b_row, b_at))
                for row, a_vector in enumerate(a_vectors):
                    place = sums[(row, column), part]
                    builder.store(step(builder, a_vector, b_vector, builder.load(place)), place)

        step_width = ir.Constant(I64, width)
        with cgutils.for_range(builder, builder.udiv(depth, step_width)) as loop:
            first = builder.mul(loop.index, step_width)
            a_at, b_at = (builder.mul(first, ir.Constant(I64, size)) for size in sizes)
            if tiles_ahead > 0:
                ask_ahead(b_at)
            for part in parts:
                add_part(part, a_at, b_at)
                if len(parts) > 1:
                    keep_reads_below(builder)
        totals = {cell: cgutils.alloca_once(builder, V_F32) for cell in cells}
        for cell in cells:
            builder.store(joined(builder, [builder.load(sums[cell, part]) for part in parts]), totals[cell])
        rest = builder.urem(depth, step_width)
        with builder.if_then(builder.icmp_unsigned("!=", rest, ir.Constant(I64, 0)), likely=False):
            whole = builder.sub(depth, rest)
            a_at, b_at = (builder.mul(whole, ir.Constant(I64, size)) for size in sizes)
            part_a, part_b = load_part(load_a(LANES), sizes[0]), load_part(load_b(LANES), sizes[1])
            a_vectors = [part_a(builder, builder.add(row, a_at), rest) for row in a_rows]
            b_vectors = [part_b(builder, builder.add(row, b_at), rest) for row in b_rows]
            for row, column in cells:
                total = step(builder, a_vectors[row], b_vectors[column], builder.load(totals[row, column]))
                builder.store(total, totals[row, column])
        folded = fold_together(builder, [builder.load(totals[cell]) for cell in cells])
        for row in range(num_rows):
            kept = ir.VectorType(I32, num_columns)
            picked = ir.Constant(kept, [row * num_columns + column for column in range(num_columns)])
            values = builder.shuffle_vector(folded, folded, picked)
            store_as(ir.VectorType(F32, num_columns), 4)(builder, moved(builder, c, c_stride, row), values)

    return emit


def joined(builder: Builder, parts: list[Value]) -> Value:
    """All sixteen lanes from a vector of them or from two halves."""
    if len(parts) == 1:
        return parts[0]
    return builder.shuffle_vector(*parts, ir.Constant(V_I32, list(range(LANES))))
