"""LLVM code for the operations of ``simd_codes``: integers in the lanes, a few bytes in memory, e4m3 floats."""

from llvmlite import ir

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
    load_as,
    looked_up,
    round_to_bf16,
    splat,
    store_as,
    table_of,
)

_V_I8 = ir.VectorType(ir.IntType(8), LANES)
_ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2^23: the float32 whose lowest bit is worth one


def load_bytes(num_bytes: int) -> Emit:
    """Lane i is byte i % num_bytes; no more than ``num_bytes`` are read."""

    def emit(builder: Builder, address: Value) -> Value:
        few = load_as(ir.VectorType(ir.IntType(8), num_bytes), 1)(builder, address)
        if num_bytes < LANES:
            few = builder.shuffle_vector(few, few, ir.Constant(V_I32, [lane % num_bytes for lane in range(LANES)]))
        return builder.zext(few, V_I32)

    return emit


def store_bytes(num_bytes: int) -> Emit:
    """Byte i is the lower 8 bits of all lanes i, i + num_bytes, ... or'ed; no more than ``num_bytes`` are written."""

    def emit(builder: Builder, address: Value, value: Value) -> None:
        step = LANES // 2
        while step >= num_bytes:
            other = ir.Constant(V_I32, [(lane + step) % LANES for lane in range(LANES)])
            value = builder.or_(value, builder.shuffle_vector(value, value, other))
            step //= 2
        few = builder.trunc(value, _V_I8)
        if num_bytes < LANES:
            first = ir.Constant(ir.VectorType(I32, num_bytes), list(range(num_bytes)))
            few = builder.shuffle_vector(few, few, first)
        store_as(few.type, 1)(builder, address, few)

    return emit


def load_unsigned(bits: int) -> Emit:
    return lambda builder, address: builder.zext(load_as(ir.IntType(bits), 1)(builder, address), I64)


def store_unsigned(bits: int) -> Emit:
    def emit(builder: Builder, address: Value, value: Value) -> None:
        store_as(ir.IntType(bits), 1)(builder, address, builder.trunc(value, ir.IntType(bits)))

    return emit


def splat_integer(builder: Builder, value: Value) -> Value:
    return splat(builder, builder.trunc(value, I32), V_I32)


def bits_of(builder: Builder, value: Value) -> Value:
    """A float32's bits as a number from 0 to 2^32 - 1."""
    return builder.zext(builder.bitcast(value, I32), I64)


def float_of(builder: Builder, bits: Value) -> Value:
    return builder.bitcast(builder.trunc(bits, I32), F32)


def lane_numbers(builder: Builder) -> Value:
    return ir.Constant(V_I32, list(range(LANES)))


def minimum(builder: Builder, a: Value, b: Value) -> Value:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def round_to_integer(builder: Builder, value: Value) -> Value:
    """The lower 22 bits are the nearest integer's, ties to even, for numbers below 2^22 in size."""
    return builder.bitcast(builder.fadd(value, constant(_ROUND_TO_INTEGER, V_F32)), V_I32)


def _mask(builder: Builder, condition: Value) -> Value:
    return builder.zext(builder.bitcast(condition, ir.IntType(LANES)), I64)


def any_nan(builder: Builder, value: Value) -> Value:
    return builder.icmp_unsigned("!=", _mask(builder, builder.fcmp_unordered("uno", value, value)), I64(0))


def first_equal(builder: Builder, value: Value, wanted: Value) -> Value:
    """The first lane equal to ``wanted``, or the number of lanes."""
    equal = _mask(builder, builder.fcmp_ordered("==", value, splat(builder, wanted)))
    return builder.cttz(builder.or_(equal, I64(1 << LANES)), ir.Constant(ir.IntType(1), 1))


def rotate(builder: Builder, value: Value) -> Value:
    """a + b and a - b of lanes 1, 2, 4 and 8 apart in turn: a Hadamard matrix's product, not scaled."""
    for step in (1, 2, 4, 8):
        partner = ir.Constant(V_I32, [lane ^ step for lane in range(LANES)])
        signs = ir.Constant(V_F32, [-1.0 if lane & step else 1.0 for lane in range(LANES)])
        value = builder.fadd(builder.fmul(value, signs), builder.shuffle_vector(value, value, partner))
    return value


def to_e4m3(builder: Builder, value: Value) -> Value:
    """The 8 bits of the nearest e4m3 float, ties to even, for numbers from -448 to 448.

    Down to 2^-6 the exponent is rebased from 127 to 7 and 20 bits of mantissa are rounded off; below, codes count
    steps of 2^-9, which is what the lowest bit of 2^14 is worth.
    """
    bits = builder.bitcast(value, V_I32)
    sign = builder.lshr(builder.and_(bits, constant(-(2**31), V_I32)), constant(24, V_I32))
    size = builder.and_(bits, constant(0x7FFFFFFF, V_I32))
    odd = builder.and_(builder.lshr(size, constant(20, V_I32)), constant(1, V_I32))
    normal = builder.add(builder.add(size, constant(0x7FFFF - (120 << 23), V_I32)), odd)
    normal = builder.lshr(normal, constant(20, V_I32))
    small = builder.fadd(builder.bitcast(size, V_F32), constant(2.0**14, V_F32))
    small = builder.sub(builder.bitcast(small, V_I32), constant((127 + 14) << 23, V_I32))
    below = builder.icmp_signed("<", size, constant((127 - 6) << 23, V_I32))
    return builder.or_(builder.select(below, small, normal), sign)


def from_e4m3(builder: Builder, code: Value) -> Value:
    """Exact: the bits where float32 has them are the number divided by 2^120, subnormal or not."""
    size = builder.shl(builder.and_(code, constant(0x7F, V_I32)), constant(20, V_I32))
    sign = builder.shl(builder.and_(code, constant(0x80, V_I32)), constant(24, V_I32))
    value = builder.fmul(builder.bitcast(builder.or_(size, sign), V_F32), constant(2.0**120, V_F32))
    nan = builder.icmp_signed("==", size, constant(0x7F << 20, V_I32))
    return builder.select(nan, constant(float("nan"), V_F32), value)


_V_I16_TWICE = ir.VectorType(ir.IntType(16), 2 * LANES)


def bf16_table(builder: Builder, value: Value) -> Value:
    """The lanes as bfloat16, a table for ``store_looked_up``."""
    return table_of(builder, round_to_bf16(builder, value))


def store_looked_up(builder: Builder, low: Value, high: Value, table: Value, source: Value) -> None:
    """The table's numbers for 32 bytes' lower halves to ``low``, and for their upper halves to ``high``."""
    pairs = builder.zext(load_as(ir.VectorType(ir.IntType(8), 2 * LANES), 1)(builder, source), _V_I16_TWICE)
    upper = builder.lshr(pairs, ir.Constant(_V_I16_TWICE, [4] * 2 * LANES))
    store = store_as(V_F32, 2)
    store(builder, low, looked_up(builder, table, pairs))
    store(builder, high, looked_up(builder, table, upper))
