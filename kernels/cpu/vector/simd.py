"""Sixteen float32 lanes as a numba value: loads, arithmetic, exp2, transpose and a matrix-product tile.

Kernels written with these do not depend on what LLVM's vectorizer makes of a loop: a lane's operations and their
order stand in the source, the same for every row wherever it lies. LLVM splits the sixteen lanes into what the
CPU has (one AVX-512 register, two AVX2, four NEON).

Addresses are integers (``Tensor.data_ptr()`` plus bytes). Nothing is bounds-checked: hosts check before they call.
"""

from functools import cache
from typing import Any

import torch
from llvmlite.binding import get_host_cpu_features, llvm_version_info
from numba.core import config, types
from numba.extending import intrinsic, models, register_model

from tightwire.kernels.cpu.vector import simd_ir as emit
from tightwire.kernels.cpu.vector import simd_packed_ir as emit_packed
from tightwire.kernels.cpu.vector import simd_tiles_ir as emit_tiles
from tightwire.kernels.cpu.vector.simd_ir import Builder, Emit, Value
from tightwire.kernels.spec.packed_format import PackedFormat

LANES = emit.LANES

# How a tensor's numbers are stored; hosts pass it to kernels as an integer.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
NUMBER_KIND = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class _Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = _Float32x16()
Vector = Any  # how kernels annotate a value of this type: it exists in compiled code only


@register_model(_Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type) -> None:
        super().__init__(manager, numba_type, emit.V_F32)


def operation(emit_code: Emit, result: types.Type, *arguments: types.Type) -> Any:
    """An intrinsic of these typed arguments whose LLVM code ``emit_code(builder, *values)`` writes."""
    signature: Any = result(*arguments)

    def codegen(context: Any, builder: Builder, sig: Any, args: tuple[Value, ...]) -> Value:
        value = emit_code(builder, *args)
        return context.get_dummy_value() if value is None else value

    # numba asks an intrinsic for its number of arguments.
    typers = {
        0: lambda typingctx: (signature, codegen),
        1: lambda typingctx, a: (signature, codegen),
        2: lambda typingctx, a, b: (signature, codegen),
        3: lambda typingctx, a, b, c: (signature, codegen),
        4: lambda typingctx, a, b, c, d: (signature, codegen),
        5: lambda typingctx, a, b, c, d, e: (signature, codegen),
        7: lambda typingctx, a, b, c, d, e, f, g: (signature, codegen),
    }
    return intrinsic(typers[len(arguments)])


# --- memory -----------------------------------------------------------------------------------------------------------

load: Any = operation(emit.load_as(emit.V_F32, 4), float32x16, types.int64)
load_bf16: Any = operation(emit.load_bf16, float32x16, types.int64)
load_f16: Any = operation(emit.load_f16, float32x16, types.int64)
store: Any = operation(emit.store_as(emit.V_F32, 4), types.void, types.int64, float32x16)
store_bf16: Any = operation(emit.store_bf16, types.void, types.int64, float32x16)
store_f16: Any = operation(emit.store_f16, types.void, types.int64, float32x16)
store_two_bf16: Any = operation(  # where bf16_products_usable; subnormal numbers become zero
    emit.store_two_bf16, types.void, types.int64, float32x16, float32x16
)
load_part: Any = operation(emit.load_part(emit.load_as(emit.V_F32, 4), 4), float32x16, types.int64, types.int64)
load_part_bf16: Any = operation(emit.load_part(emit.load_bf16, 2), float32x16, types.int64, types.int64)
load_part_f16: Any = operation(emit.load_part(emit.load_f16, 2), float32x16, types.int64, types.int64)
store_part: Any = operation(
    emit.store_part(emit.store_as(emit.V_F32, 4), 4), types.void, types.int64, float32x16, types.int64
)
store_part_bf16: Any = operation(emit.store_part(emit.store_bf16, 2), types.void, types.int64, float32x16, types.int64)
store_part_f16: Any = operation(emit.store_part(emit.store_f16, 2), types.void, types.int64, float32x16, types.int64)
store_rounded: Any = operation(emit.store_rounded, types.void, types.int64, float32x16)  # AVX512-BF16
interleave: Any = operation(emit.interleave, types.void, types.int64, types.int64, types.int64)
load_scalar: Any = operation(emit.load_as(emit.F32, 4), types.float32, types.int64)
store_scalar: Any = operation(emit.store_as(emit.F32, 4), types.void, types.int64, types.float32)
load_i32: Any = operation(emit.sign_extended(emit.I32, 4), types.int64, types.int64)
load_i64: Any = operation(emit.load_as(emit.I64, 8), types.int64, types.int64)
store_i64: Any = operation(emit.store_as(emit.I64, 8), types.void, types.int64, types.int64)
copy_bytes: Any = operation(emit.copy_bytes, types.void, types.int64, types.int64, types.int64)
fetch_add: Any = operation(emit.fetch_add, types.int64, types.int64)  # returns the value before; safe between threads


# --- arithmetic -------------------------------------------------------------------------------------------------------

_V = float32x16
splat: Any = operation(emit.splat, _V, types.float32)
add: Any = operation(lambda builder, a, b: builder.fadd(a, b), _V, _V, _V)
sub: Any = operation(lambda builder, a, b: builder.fsub(a, b), _V, _V, _V)
mul: Any = operation(lambda builder, a, b: builder.fmul(a, b), _V, _V, _V)
div: Any = operation(lambda builder, a, b: builder.fdiv(a, b), _V, _V, _V)
fma: Any = operation(emit.fma, _V, _V, _V, _V)  # a * b + c, rounded once
maximum: Any = operation(emit.maximum, _V, _V, _V)
keep_first: Any = operation(emit.keep_first, _V, _V, types.int64, types.float32)
sum_lanes: Any = operation(emit.fold(lambda builder, a, b: builder.fadd(a, b)), types.float32, _V)
max_lanes: Any = operation(emit.fold(emit.maximum), types.float32, _V)
exp2: Any = operation(emit.exp2, _V, _V)
exp: Any = operation(emit.exp, _V, _V)
bf16_rounded: Any = operation(emit.bf16_rounded, _V, _V)
bf16_narrowed: Any = operation(emit.bf16_narrowed, _V, _V)  # the same by AVX512-BF16; subnormal numbers become zero
f16_rounded: Any = operation(emit.f16_rounded, _V, _V)


# --- blocks -----------------------------------------------------------------------------------------------------------


def make_tile_product(num_rows: int, num_vectors: int, *, accumulate: bool, pairs: bool = False) -> Any:
    """``c = a @ b``, or ``c += a @ b``, for a (num_rows, depth), b (depth, 16 * num_vectors), all float32.

    ``pairs``: a and b hold two bfloat16 in each place, whose products are added; only if ``bf16_products_usable()``.

    The returned intrinsic takes (c, c_stride, a, a_stride, b, b_stride, depth), strides in bytes. c stays in registers
    over the whole depth. Each element is one chain of fused multiply-adds in order of depth, whatever the tile's
    shape, so tiles of unlike shapes give the same bits.
    """
    step = emit.multiply_add_pairs if pairs else emit.fma
    return operation(emit_tiles.tile_product(num_rows, num_vectors, accumulate, step), types.void, *[types.int64] * 7)


def make_tile_dot(num_rows: int, num_columns: int, kind: int, *, tiles_ahead: int = 0, cache_level: int = 1) -> Any:
    """``c = a @ b^T`` for a (num_rows, depth), b (num_columns, depth) of ``kind``, c float32; up to 16 elements.

    a is float32, but bfloat16 when b is and ``bf16_products_usable()``. The returned intrinsic takes (c, c_stride, a,
    a_stride, b, b_stride, depth), strides in bytes. Both are read along their rows, as they lie. Each element has
    sixteen chains of multiply-adds, lane by lane in order of depth, added in a fixed tree, whatever the tile's shape.

    ``tiles_ahead``: ask for the rows in b that so many tiles further on will be read from the cache of ``cache_level``.
    """
    load_a = emit.load_floats
    load_b = {FLOAT32: emit.load_floats, BFLOAT16: emit.load_bf16s, FLOAT16: emit.load_f16s}[kind]
    step, width, sizes = emit.fma, LANES, (4, 4 if kind == FLOAT32 else 2)
    if kind == BFLOAT16 and bf16_products_usable():
        load_a = load_b = lambda lanes: emit.load_pairs
        step, width, sizes = emit.multiply_add_pairs, 2 * LANES, (2, 2)
    lanes = _lanes_at_once()
    code = emit_tiles.tile_dot(
        num_rows,
        num_columns,
        load_a,
        load_b,
        step,
        width,
        sizes,
        lanes=lanes,
        tiles_ahead=tiles_ahead,
        cache_level=cache_level,
    )
    return operation(code, types.void, *[types.int64] * 7)


def make_packed_dot(num_columns: int, packed: PackedFormat, *, pairs: bool = False) -> Any:
    """``c = a @ b^T`` for one row of float32 in a and ``num_columns`` packed rows in b, unpacked on the way.

    The returned intrinsic takes (c, a, b, b_stride, num_groups), the stride in bytes. The bits are those of
    ``make_tile_dot`` with the unpacked rows. ``pairs``: a is bfloat16, and b is rounded to it; only if
    ``bf16_products_usable()``.
    """
    code = emit_packed.packed_dot(num_columns, packed, _lanes_at_once(), pairs=pairs)
    return operation(code, types.void, *[types.int64] * 5)


def make_unpack(packed: PackedFormat, *, pairs: bool = False) -> Any:
    """An intrinsic that takes (target, source, num_groups): a packed row's numbers as float32, or in ``pairs`` bfloat16."""
    return operation(emit_packed.unpack(packed, _lanes_at_once(), pairs=pairs), types.void, *[types.int64] * 3)


def make_stack(num_floats: int) -> Any:
    """An intrinsic without arguments: the address of ``num_floats`` floats in the calling function's frame."""
    return operation(emit.stack(num_floats), types.int64)


@cache
def bf16_products_usable() -> bool:
    """Whether compiled code may multiply, round to and look up 32 bfloat16 numbers at a time.

    AVX512-BF16, an LLVM that knows its type, and AVX-512BW to look up: every such CPU has it, a virtual one may hide it.
    """
    return llvm_version_info[0] >= 17 and _has_feature("avx512bf16") and _has_feature("avx512bw")


@cache
def has_wide_registers() -> bool:
    """Whether the lanes of a vector fit one register of 32: AVX-512. Else tiles have eight floats times 16 to live in."""
    return _has_feature("avx512f")


def _lanes_at_once() -> int:
    return LANES if has_wide_registers() else LANES // 2


def _has_feature(name: str) -> bool:
    settings: Any = config
    if settings.CPU_NAME is not None or settings.CPU_FEATURES is not None:
        return False  # numba was told to compile for another CPU than this one
    return get_host_cpu_features().get(name, False)


# From 16 rows of 16 floats to 16 columns: (source, source_stride, target, target_stride).
transpose: Any = operation(
    emit.transpose if has_wide_registers() else emit.transpose_by_eights, types.void, *[types.int64] * 4
)
