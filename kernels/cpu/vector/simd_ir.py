"""LLVM code for the vector operations of ``simd``: functions that write instructions through an IR builder.

Sixteen float32 lanes throughout. Nothing here carries fast-math flags: LLVM may neither reorder nor contract, so an
operation gives the same bits on every CPU that has it, in every kernel it stands in.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

LANES = 16

# llvmlite is not annotated: these say what is meant.
Value = Any  # ir.Value
Builder = Any  # ir.IRBuilder
Emit = Callable[..., Value]

I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
V_F32 = ir.VectorType(F32, LANES)
V_I32 = ir.VectorType(I32, LANES)
V_I16 = ir.VectorType(ir.IntType(16), LANES)
V_F16 = ir.VectorType(ir.HalfType(), LANES)


def constant(value: float, kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def splat(builder: Builder, scalar: Value, kind: ir.VectorType = V_F32) -> Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(V_I32, [0] * LANES))


def load_as(kind: ir.Type, align: int) -> Emit:
    def emit(builder: Builder, address: Value) -> Value:
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

    return emit


def store_as(kind: ir.Type, align: int) -> Emit:
    def emit(builder: Builder, address: Value, value: Value) -> None:
        builder.store(value, builder.inttoptr(address, kind.as_pointer()), align=align)

    return emit


def load_floats(lanes: int) -> Emit:
    return load_as(ir.VectorType(F32, lanes), 4)


def load_bf16s(lanes: int) -> Emit:
    wide = ir.VectorType(I32, lanes)

    def emit(builder: Builder, address: Value) -> Value:
        bits = builder.zext(load_as(ir.VectorType(ir.IntType(16), lanes), 2)(builder, address), wide)
        shifted = builder.shl(bits, ir.Constant(wide, [16] * lanes))
        return builder.bitcast(shifted, ir.VectorType(F32, lanes))

    return emit


def load_f16s(lanes: int) -> Emit:
    def emit(builder: Builder, address: Value) -> Value:
        halves = load_as(ir.VectorType(ir.HalfType(), lanes), 2)(builder, address)
        return builder.fpext(halves, ir.VectorType(F32, lanes))

    return emit


load_bf16, load_f16 = load_bf16s(LANES), load_f16s(LANES)


def round_to_bf16(builder: Builder, value: Value) -> Value:
    """The upper 16 bits, rounded to nearest even; NaN stays NaN (rounding up could carry it into infinity)."""
    bits = builder.bitcast(value, V_I32)
    odd = builder.and_(builder.lshr(bits, constant(16, V_I32)), constant(1, V_I32))
    rounded = builder.add(builder.add(bits, constant(0x7FFF, V_I32)), odd)
    kept = builder.select(builder.fcmp_unordered("uno", value, value), constant(0x7FC00000, V_I32), rounded)
    return builder.trunc(builder.lshr(kept, constant(16, V_I32)), V_I16)


def store_bf16(builder: Builder, address: Value, value: Value) -> None:
    store_as(V_I16, 2)(builder, address, round_to_bf16(builder, value))


def bf16_rounded(builder: Builder, value: Value) -> Value:
    return _widened(builder, round_to_bf16(builder, value))


def _widened(builder: Builder, upper_bits: Value) -> Value:
    return builder.bitcast(builder.shl(builder.zext(upper_bits, V_I32), constant(16, V_I32)), V_F32)


def store_f16(builder: Builder, address: Value, value: Value) -> None:
    store_as(V_F16, 2)(builder, address, builder.fptrunc(value, V_F16))


def f16_rounded(builder: Builder, value: Value) -> Value:
    return builder.fpext(builder.fptrunc(value, V_F16), V_F32)


def sign_extended(kind: ir.Type, align: int) -> Emit:
    return lambda builder, address: builder.sext(load_as(kind, align)(builder, address), I64)


def copy_bytes(builder: Builder, target: Value, source: Value, count: Value) -> None:
    byte_p = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(builder, builder.inttoptr(target, byte_p), builder.inttoptr(source, byte_p), count, 1, align=1)


def prefetch(builder: Builder, address: Value, level: int = 1) -> None:
    """Ask for a cache line, to be in the cache of ``level`` when it is read; any address will do."""
    byte_p = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte_p, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
    builder.call(fetch, [builder.inttoptr(address, byte_p), *(ir.Constant(I32, value) for value in (0, 4 - level, 1))])


def keep_reads_below(builder: Builder) -> None:
    """What is read after this is not read before it: LLVM else reads early, and what it has read fills registers."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def fetch_add(builder: Builder, address: Value) -> Value:
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), ir.Constant(I64, 1), "seq_cst")


def load_part(load_whole: Emit, number_bytes: int) -> Emit:
    """The first ``count`` lanes from memory, zeros in the others, without reading past them."""

    def emit(builder: Builder, address: Value, count: Value) -> Value:
        stage = cgutils.alloca_once(builder, V_F32)
        builder.store(constant(0.0, V_F32), stage)
        stage = builder.ptrtoint(stage, I64)
        copy_bytes(builder, stage, address, builder.mul(count, ir.Constant(I64, number_bytes)))
        return load_whole(builder, stage)

    return emit


def store_part(store_whole: Emit, number_bytes: int) -> Emit:
    """The first ``count`` lanes to memory, nothing past them."""

    def emit(builder: Builder, address: Value, value: Value, count: Value) -> None:
        stage = builder.ptrtoint(cgutils.alloca_once(builder, V_F32), I64)
        store_whole(builder, stage, value)
        copy_bytes(builder, address, stage, builder.mul(count, ir.Constant(I64, number_bytes)))

    return emit


def fma(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    kind = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32"), [a, b, c])


def maximum(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def keep_first(builder: Builder, value: Value, count: Value, fill: Value) -> Value:
    """Lanes below ``count`` of ``value``, ``fill`` in the others."""
    lanes = ir.Constant(V_I32, list(range(LANES)))
    inside = builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), V_I32))
    return builder.select(inside, value, splat(builder, fill))


def fold(combine: Emit) -> Emit:
    """Combine all lanes in a fixed tree: halves, quarters, and so on."""

    def emit(builder: Builder, value: Value) -> Value:
        for step in (8, 4, 2, 1):
            other = ir.Constant(V_I32, [(lane + step) % LANES for lane in range(LANES)])
            value = combine(builder, value, builder.shuffle_vector(value, value, other))
        return builder.extract_element(value, ir.Constant(I32, 0))

    return emit


# 2^f on [-1/2, 1/2], coefficients ln(2)^k / k!: the first one left out is below 2e-8 of the result.
_EXP2 = [1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158]
_EXP2 += [0.009618129107628477, 0.0013333558146428443, 0.00015403530393381608]


_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds a float32 to an integer, left in the low bits
_LOG2_E = 1.4426950408889634
_LOG2_E_LOW = 1.925963033500231e-08  # what float32 loses of it


def _power_of_two(builder: Builder, shifted: Value, fraction: Value) -> Value:
    """2^(n + fraction), n the integer in the low bits of ``shifted``, -126 to 128 (infinity)."""
    power = constant(_EXP2[-1], V_F32)
    for coefficient in reversed(_EXP2[:-1]):
        power = fma(builder, power, fraction, constant(coefficient, V_F32))
    exponent = builder.shl(builder.bitcast(shifted, V_I32), constant(23, V_I32))
    scale = builder.bitcast(builder.add(exponent, constant(127 << 23, V_I32)), V_F32)
    return builder.fmul(power, scale)


def exp2(builder: Builder, x: Value) -> Value:
    """2^x for x up to 127; exactly 1 at 0, exactly 0 below -126 (no denormals), NaN at NaN."""
    tiny = builder.fcmp_ordered("<", x, constant(-126.0, V_F32))
    x = builder.select(tiny, constant(-126.0, V_F32), x)
    shifted = builder.fadd(x, constant(_MAGIC, V_F32))
    fraction = builder.fsub(x, builder.fsub(shifted, constant(_MAGIC, V_F32)))
    return builder.select(tiny, constant(0.0, V_F32), _power_of_two(builder, shifted, fraction))


def exp(builder: Builder, x: Value) -> Value:
    """e^x within two units in the last place; 0 below -87, infinity above 88.4, NaN at NaN."""
    tiny = builder.fcmp_ordered("<", x, constant(-87.0, V_F32))
    huge = builder.fcmp_ordered(">", x, constant(88.4, V_F32))
    x = builder.select(builder.or_(tiny, huge), constant(0.0, V_F32), x)
    shifted = fma(builder, x, constant(_LOG2_E, V_F32), constant(_MAGIC, V_F32))
    whole = builder.fsub(shifted, constant(_MAGIC, V_F32))
    fraction = fma(builder, x, constant(_LOG2_E, V_F32), builder.fneg(whole))
    fraction = fma(builder, x, constant(_LOG2_E_LOW, V_F32), fraction)
    power = builder.select(tiny, constant(0.0, V_F32), _power_of_two(builder, shifted, fraction))
    return builder.select(huge, constant(math.inf, V_F32), power)


def transpose(builder: Builder, source: Value, source_stride: Value, target: Value, target_stride: Value) -> None:
    """16 rows of 16 floats become columns; strides are bytes. Four rounds of swaps between rows 1, 2, 4, 8 apart."""

    def row(base: Value, stride: Value, index: int) -> Value:
        return builder.add(base, builder.mul(stride, ir.Constant(I64, index)))

    rows = [load_as(V_F32, 4)(builder, row(source, source_stride, i)) for i in range(LANES)]
    for step in (1, 2, 4, 8):
        low = [lane if not lane & step else lane - step + LANES for lane in range(LANES)]
        high = [lane + step if not lane & step else lane + LANES for lane in range(LANES)]
        for i in (i for i in range(LANES) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i] = builder.shuffle_vector(a, b, ir.Constant(V_I32, low))
            rows[i + step] = builder.shuffle_vector(a, b, ir.Constant(V_I32, high))
    for i, value in enumerate(rows):
        store_as(V_F32, 4)(builder, row(target, target_stride, i), value)


_EIGHT = 8
_PAIRED = ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])  # of two rows of eight, in both 128-bit halves
_QUARTERED = ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_HALVED = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def transpose_by_eights(
    builder: Builder, source: Value, source_stride: Value, target: Value, target_stride: Value
) -> None:
    """``transpose`` in four squares of eight, each of which fits AVX2's registers: 24 shuffles of one instruction."""
    load, store = load_floats(_EIGHT), store_as(ir.VectorType(F32, _EIGHT), 4)

    def both(a: Value, b: Value, masks: tuple[list[int], list[int]]) -> list[Value]:
        return [builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, _EIGHT), mask)) for mask in masks]

    def place(base: Value, stride: Value, row: int, column: int) -> Value:
        at = builder.add(base, builder.mul(stride, ir.Constant(I64, row)))
        return builder.add(at, ir.Constant(I64, 4 * column))

    for top in range(0, LANES, _EIGHT):
        for left in range(0, LANES, _EIGHT):
            rows = [load(builder, place(source, source_stride, top + i, left)) for i in range(_EIGHT)]
            pairs = [row for i in range(0, _EIGHT, 2) for row in both(rows[i], rows[i + 1], _PAIRED)]
            fours = [row for i in (0, 1, 4, 5) for row in both(pairs[i], pairs[i + 2], _QUARTERED)]
            for i in range(_EIGHT // 2):
                for column, value in zip((i, i + 4), both(fours[i], fours[i + 4], _HALVED), strict=True):
                    store(builder, place(target, target_stride, left + column, top), value)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def load_pairs(builder: Builder, address: Value) -> Value:
    return builder.bitcast(load_as(V_I32, 2)(builder, address), V_F32)


def multiply_add_pairs(builder: Builder, a: Value, b: Value, total: Value) -> Value:
    """total + a[1] * b[1] + a[0] * b[0] in each lane of two bfloat16: AVX512-BF16."""
    kind = ir.FunctionType(V_F32, [V_F32, _PAIRS, _PAIRS])
    product = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(product, [total, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)])


def narrowed(builder: Builder, value: Value) -> Value:
    """``round_to_bf16`` in one instruction of AVX512-BF16, which makes zeros of denormals."""
    kind = ir.FunctionType(ir.VectorType(_BFloat(), LANES), [V_F32])
    narrow = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtneps2bf16.512")
    return builder.bitcast(builder.call(narrow, [value]), V_I16)


def bf16_narrowed(builder: Builder, value: Value) -> Value:
    return _widened(builder, narrowed(builder, value))


def narrowed_pairs(builder: Builder, first: Value, second: Value) -> Value:
    """``narrowed`` of 32 numbers that follow each other, as ``load_pairs`` gives them."""
    kind = ir.FunctionType(_PAIRS, [V_F32, V_F32])
    narrow = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return builder.bitcast(builder.call(narrow, [second, first]), V_F32)


def store_rounded(builder: Builder, address: Value, value: Value) -> None:
    """Sixteen numbers as bfloat16, see ``narrowed``."""
    store_as(V_I16, 2)(builder, address, narrowed(builder, value))


def table_of(builder: Builder, numbers: Value) -> Value:
    """Sixteen 16-bit numbers for ``looked_up``: twice, as its instruction takes five bits of a place."""
    twice = ir.Constant(ir.VectorType(I32, 2 * LANES), [*range(LANES)] * 2)
    return builder.bitcast(builder.shuffle_vector(numbers, numbers, twice), V_F32)


def looked_up(builder: Builder, table: Value, places: Value) -> Value:
    """Of the numbers of ``table_of`` those that the lower four bits of 32 16-bit ``places`` name: AVX-512BW."""
    wide = ir.VectorType(ir.IntType(16), 2 * LANES)
    kind = ir.FunctionType(wide, [wide, wide])
    permute = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.hi.512")
    return builder.bitcast(builder.call(permute, [builder.bitcast(table, wide), places]), V_F32)


def interleave(builder: Builder, first: Value, second: Value, target: Value) -> None:
    """Sixteen 16-bit numbers at ``first`` and at ``second`` become sixteen pairs."""
    low, high = (builder.zext(load_as(V_I16, 2)(builder, source), V_I32) for source in (first, second))
    store_as(V_I32, 4)(builder, target, builder.or_(low, builder.shl(high, constant(16, V_I32))))


def store_two_bf16(builder: Builder, address: Value, first: Value, second: Value) -> None:
    """Two vectors' numbers as bfloat16, see ``narrowed_pairs``."""
    store_as(V_F32, 2)(builder, address, narrowed_pairs(builder, first, second))


def stack(num_floats: int) -> Emit:
    def emit(builder: Builder) -> Value:
        with builder.goto_entry_block():  # not numba's alloca_once, which writes zeros, and for LLVM one by one
            place = builder.alloca(ir.ArrayType(F32, num_floats))
        place.align = 64  # a cache line: no vector load of a row lies across two
        return builder.ptrtoint(place, I64)

    return emit
