"""Sixteen float32 lanes as a numba value: loads, arithmetic, exp2, transpose and a matrix-product tile.

Kernels written with these do not depend on what LLVM's vectorizer makes of a loop: a lane's operations and their
order stand in the source, the same for every row wherever it lies. LLVM splits the sixteen lanes into what the
CPU has (one AVX-512 register, two AVX2, four NEON).

Addresses are integers (``Tensor.data_ptr()`` plus bytes). Nothing is bounds-checked: hosts check before they call.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic, models, register_model

LANES = 16

# How a tensor's numbers are stored; hosts pass it to kernels as an integer.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
NUMBER_KIND = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_V_F32 = ir.VectorType(_F32, LANES)
_V_I32 = ir.VectorType(_I32, LANES)
_V_I16 = ir.VectorType(ir.IntType(16), LANES)
_V_F16 = ir.VectorType(ir.HalfType(), LANES)


class _Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = _Float32x16()
Vector = Any  # how kernels annotate a value of this type: it exists in compiled code only


@register_model(_Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type) -> None:
        super().__init__(manager, numba_type, _V_F32)


_Emit = Callable[..., ir.Value]


def _operation(emit: _Emit, result: types.Type, *arguments: types.Type) -> Any:
    """An intrinsic of up to three typed arguments whose LLVM code ``emit(builder, *values)`` writes."""
    signature: Signature = result(*arguments)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Signature, args: tuple[ir.Value, ...]) -> ir.Value:
        value = emit(builder, *args)
        return context.get_dummy_value() if value is None else value

    if len(arguments) == 1:
        return intrinsic(lambda typingctx, a: (signature, codegen))
    if len(arguments) == 2:
        return intrinsic(lambda typingctx, a, b: (signature, codegen))
    if len(arguments) == 3:
        return intrinsic(lambda typingctx, a, b, c: (signature, codegen))
    return intrinsic(lambda typingctx, a, b, c, d: (signature, codegen))


def _constant(value: float, kind: ir.VectorType) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.VectorType = _V_F32) -> ir.Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(_V_I32, [0] * LANES))


def _load_as(kind: ir.Type, align: int) -> _Emit:
    def emit(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

    return emit


def _store_as(kind: ir.Type, align: int) -> _Emit:
    def emit(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
        builder.store(value, builder.inttoptr(address, kind.as_pointer()), align=align)

    return emit


# --- memory ---------------------------------------------------------------------------------------------------------


def _load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    bits = builder.zext(_load_as(_V_I16, 2)(builder, address), _V_I32)
    return builder.bitcast(builder.shl(bits, _constant(16, _V_I32)), _V_F32)


def _round_to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The upper 16 bits, rounded to nearest even; NaN stays NaN (rounding up could carry it into infinity)."""
    bits = builder.bitcast(value, _V_I32)
    odd = builder.and_(builder.lshr(bits, _constant(16, _V_I32)), _constant(1, _V_I32))
    rounded = builder.add(builder.add(bits, _constant(0x7FFF, _V_I32)), odd)
    kept = builder.select(builder.fcmp_unordered("uno", value, value), _constant(0x7FC00000, _V_I32), rounded)
    return builder.trunc(builder.lshr(kept, _constant(16, _V_I32)), _V_I16)


def _store_bf16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    _store_as(_V_I16, 2)(builder, address, _round_to_bf16(builder, value))


def _bf16_rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    bits = builder.zext(_round_to_bf16(builder, value), _V_I32)
    return builder.bitcast(builder.shl(bits, _constant(16, _V_I32)), _V_F32)


def _load_f16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.fpext(_load_as(_V_F16, 2)(builder, address), _V_F32)


def _store_f16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    _store_as(_V_F16, 2)(builder, address, builder.fptrunc(value, _V_F16))


def _f16_rounded(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.fpext(builder.fptrunc(value, _V_F16), _V_F32)


def _sign_extended(kind: ir.Type, align: int) -> _Emit:
    return lambda builder, address: builder.sext(_load_as(kind, align)(builder, address), _I64)


def _copy_bytes(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, count: ir.Value) -> None:
    byte_p = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(builder, builder.inttoptr(target, byte_p), builder.inttoptr(source, byte_p), count, 1, align=1)


def _fetch_add(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", builder.inttoptr(address, _I64.as_pointer()), ir.Constant(_I64, 1), "seq_cst")


def _load_part(load_whole: _Emit, number_bytes: int) -> _Emit:
    """The first ``count`` lanes from memory, zeros in the others, without reading past them."""

    def emit(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
        stage = cgutils.alloca_once(builder, _V_F32)
        builder.store(_constant(0.0, _V_F32), stage)
        stage = builder.ptrtoint(stage, _I64)
        _copy_bytes(builder, stage, address, builder.mul(count, ir.Constant(_I64, number_bytes)))
        return load_whole(builder, stage)

    return emit


def _store_part(store_whole: _Emit, number_bytes: int) -> _Emit:
    """The first ``count`` lanes to memory, nothing past them."""

    def emit(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value) -> None:
        stage = builder.ptrtoint(cgutils.alloca_once(builder, _V_F32), _I64)
        store_whole(builder, stage, value)
        _copy_bytes(builder, address, stage, builder.mul(count, ir.Constant(_I64, number_bytes)))

    return emit


load: Any = _operation(_load_as(_V_F32, 4), float32x16, types.int64)
load_bf16: Any = _operation(_load_bf16, float32x16, types.int64)
load_f16: Any = _operation(_load_f16, float32x16, types.int64)
store: Any = _operation(_store_as(_V_F32, 4), types.void, types.int64, float32x16)
store_bf16: Any = _operation(_store_bf16, types.void, types.int64, float32x16)
store_f16: Any = _operation(_store_f16, types.void, types.int64, float32x16)
load_part: Any = _operation(_load_part(_load_as(_V_F32, 4), 4), float32x16, types.int64, types.int64)
load_part_bf16: Any = _operation(_load_part(_load_bf16, 2), float32x16, types.int64, types.int64)
load_part_f16: Any = _operation(_load_part(_load_f16, 2), float32x16, types.int64, types.int64)
store_part: Any = _operation(_store_part(_store_as(_V_F32, 4), 4), types.void, types.int64, float32x16, types.int64)
store_part_bf16: Any = _operation(_store_part(_store_bf16, 2), types.void, types.int64, float32x16, types.int64)
store_part_f16: Any = _operation(_store_part(_store_f16, 2), types.void, types.int64, float32x16, types.int64)
load_scalar: Any = _operation(_load_as(_F32, 4), types.float32, types.int64)
store_scalar: Any = _operation(_store_as(_F32, 4), types.void, types.int64, types.float32)
load_i32: Any = _operation(_sign_extended(_I32, 4), types.int64, types.int64)
load_i64: Any = _operation(_load_as(_I64, 8), types.int64, types.int64)
store_i64: Any = _operation(_store_as(_I64, 8), types.void, types.int64, types.int64)
copy_bytes: Any = _operation(_copy_bytes, types.void, types.int64, types.int64, types.int64)
fetch_add: Any = _operation(_fetch_add, types.int64, types.int64)  # returns the value before; safe between threads


# --- arithmetic -----------------------------------------------------------------------------------------------------


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    kind = ir.FunctionType(_V_F32, [_V_F32] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def _maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _keep_first(builder: ir.IRBuilder, value: ir.Value, count: ir.Value, fill: ir.Value) -> ir.Value:
    """Lanes below ``count`` of ``value``, ``fill`` in the others."""
    lanes = ir.Constant(_V_I32, list(range(LANES)))
    inside = builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32), _V_I32))
    return builder.select(inside, value, _splat(builder, fill))


def _fold(combine: _Emit) -> _Emit:
    """Combine all lanes in a fixed tree: halves, quarters, and so on."""

    def emit(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
        for step in (8, 4, 2, 1):
            other = ir.Constant(_V_I32, [(lane + step) % LANES for lane in range(LANES)])
            value = combine(builder, value, builder.shuffle_vector(value, value, other))
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return emit


# 2^f on [-1/2, 1/2], coefficients ln(2)^k / k!: the first one left out is below 2e-8 of the result.
_EXP2 = [1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158]
_EXP2 += [0.009618129107628477, 0.0013333558146428443, 0.00015403530393381608]


_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds a float32 to an integer, left in the low bits
_LOG2_E = 1.4426950408889634
_LOG2_E_LOW = 1.925963033500231e-08  # what float32 loses of it


def _power_of_two(builder: ir.IRBuilder, shifted: ir.Value, fraction: ir.Value) -> ir.Value:
    """2^(n + fraction), n the integer in the low bits of ``shifted``, -126 to 128 (infinity)."""
    power = _constant(_EXP2[-1], _V_F32)
    for coefficient in reversed(_EXP2[:-1]):
        power = _fma(builder, power, fraction, _constant(coefficient, _V_F32))
    exponent = builder.shl(builder.bitcast(shifted, _V_I32), _constant(23, _V_I32))
    scale = builder.bitcast(builder.add(exponent, _constant(127 << 23, _V_I32)), _V_F32)
    return builder.fmul(power, scale)


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x up to 127; exactly 1 at 0, exactly 0 below -126 (no denormals), NaN at NaN."""
    tiny = builder.fcmp_ordered("<", x, _constant(-126.0, _V_F32))
    x = builder.select(tiny, _constant(-126.0, _V_F32), x)
    shifted = builder.fadd(x, _constant(_MAGIC, _V_F32))
    fraction = builder.fsub(x, builder.fsub(shifted, _constant(_MAGIC, _V_F32)))
    return builder.select(tiny, _constant(0.0, _V_F32), _power_of_two(builder, shifted, fraction))


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x within two units in the last place; 0 below -87, infinity above 88.4, NaN at NaN."""
    tiny = builder.fcmp_ordered("<", x, _constant(-87.0, _V_F32))
    huge = builder.fcmp_ordered(">", x, _constant(88.4, _V_F32))
    x = builder.select(builder.or_(tiny, huge), _constant(0.0, _V_F32), x)
    shifted = _fma(builder, x, _constant(_LOG2_E, _V_F32), _constant(_MAGIC, _V_F32))
    whole = builder.fsub(shifted, _constant(_MAGIC, _V_F32))
    fraction = _fma(builder, x, _constant(_LOG2_E, _V_F32), builder.fneg(whole))
    fraction = _fma(builder, x, _constant(_LOG2_E_LOW, _V_F32), fraction)
    power = builder.select(tiny, _constant(0.0, _V_F32), _power_of_two(builder, shifted, fraction))
    return builder.select(huge, _constant(math.inf, _V_F32), power)


_V = float32x16
splat: Any = _operation(_splat, _V, types.float32)
add: Any = _operation(lambda builder, a, b: builder.fadd(a, b), _V, _V, _V)
sub: Any = _operation(lambda builder, a, b: builder.fsub(a, b), _V, _V, _V)
mul: Any = _operation(lambda builder, a, b: builder.fmul(a, b), _V, _V, _V)
div: Any = _operation(lambda builder, a, b: builder.fdiv(a, b), _V, _V, _V)
fma: Any = _operation(_fma, _V, _V, _V, _V)  # a * b + c, rounded once
maximum: Any = _operation(_maximum, _V, _V, _V)
keep_first: Any = _operation(_keep_first, _V, _V, types.int64, types.float32)
sum_lanes: Any = _operation(_fold(lambda builder, a, b: builder.fadd(a, b)), types.float32, _V)
max_lanes: Any = _operation(_fold(_maximum), types.float32, _V)
exp2: Any = _operation(_exp2, _V, _V)
exp: Any = _operation(_exp, _V, _V)
bf16_rounded: Any = _operation(_bf16_rounded, _V, _V)
f16_rounded: Any = _operation(_f16_rounded, _V, _V)


# --- blocks ---------------------------------------------------------------------------------------------------------


def _transpose(
    builder: ir.IRBuilder, source: ir.Value, source_stride: ir.Value, target: ir.Value, target_stride: ir.Value
) -> None:
    """16 rows of 16 floats become columns; strides are bytes. Four rounds of swaps between rows 1, 2, 4, 8 apart."""

    def row(base: ir.Value, stride: ir.Value, index: int) -> ir.Value:
        return builder.add(base, builder.mul(stride, ir.Constant(_I64, index)))

    rows = [_load_as(_V_F32, 4)(builder, row(source, source_stride, i)) for i in range(LANES)]
    for step in (1, 2, 4, 8):
        low = [lane if not lane & step else lane - step + LANES for lane in range(LANES)]
        high = [lane + step if not lane & step else lane + LANES for lane in range(LANES)]
        for i in (i for i in range(LANES) if not i & step):
            a, b = rows[i], rows[i + step]
            rows[i] = builder.shuffle_vector(a, b, ir.Constant(_V_I32, low))
            rows[i + step] = builder.shuffle_vector(a, b, ir.Constant(_V_I32, high))
    for i, value in enumerate(rows):
        _store_as(_V_F32, 4)(builder, row(target, target_stride, i), value)


transpose: Any = _operation(_transpose, types.void, types.int64, types.int64, types.int64, types.int64)


def make_tile_product(num_rows: int, num_vectors: int, *, accumulate: bool) -> Any:
    """``c = a @ b``, or ``c += a @ b``, for a (num_rows, depth), b (depth, 16 * num_vectors), all float32.

    The returned intrinsic takes (c, c_stride, a, a_stride, b, b_stride, depth), strides in bytes. c stays in registers
    over the whole depth. Each element is one chain of fused multiply-adds in order of depth, whatever the tile's
    shape, so tiles of unlike shapes give the same bits.
    """

    def emit(builder: ir.IRBuilder, args: tuple[ir.Value, ...]) -> None:
        c, c_stride, a, a_stride, b, b_stride, depth = args

        def offset(base: ir.Value, stride: ir.Value, row: int, vector: int = 0) -> ir.Value:
            moved = builder.add(base, builder.mul(stride, ir.Constant(_I64, row)))
            return builder.add(moved, ir.Constant(_I64, vector * LANES * 4))

        where = [[offset(c, c_stride, row, vec) for vec in range(num_vectors)] for row in range(num_rows)]
        sums = [[cgutils.alloca_once(builder, _V_F32) for _ in range(num_vectors)] for _ in range(num_rows)]
        for row in range(num_rows):
            for vec in range(num_vectors):
                start = _load_as(_V_F32, 4)(builder, where[row][vec]) if accumulate else _constant(0.0, _V_F32)
                builder.store(start, sums[row][vec])
        with cgutils.for_range(builder, depth) as loop:
            b_row = builder.add(b, builder.mul(b_stride, loop.index))
            a_column = builder.add(a, builder.mul(ir.Constant(_I64, 4), loop.index))
            b_vectors = [_load_as(_V_F32, 4)(builder, offset(b_row, b_stride, 0, vec)) for vec in range(num_vectors)]
            for row in range(num_rows):
                factor = _splat(builder, _load_as(_F32, 4)(builder, offset(a_column, a_stride, row)))
                for vec in range(num_vectors):
                    total = builder.load(sums[row][vec])
                    builder.store(_fma(builder, factor, b_vectors[vec], total), sums[row][vec])
        for row in range(num_rows):
            for vec in range(num_vectors):
                _store_as(_V_F32, 4)(builder, where[row][vec], builder.load(sums[row][vec]))

    signature = types.void(*[types.int64] * 7)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Signature, args: tuple[ir.Value, ...]) -> ir.Value:
        emit(builder, args)
        return context.get_dummy_value()

    return intrinsic(lambda typingctx, c, c_stride, a, a_stride, b, b_stride, depth: (signature, codegen))
