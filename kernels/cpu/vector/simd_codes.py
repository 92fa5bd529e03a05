"""Sixteen 32-bit integer lanes beside ``simd``'s floats: codes of a few bits, cut out of bytes and packed into them.

Bytes lie at any address; a scalar in a kernel is an int64, of which the operations here take the lower bits.
"""

from typing import Any

from numba.core import types
from numba.extending import models, register_model

from tightwire.kernels.cpu.vector import simd_codes_ir as emit
from tightwire.kernels.cpu.vector.simd import float32x16, operation
from tightwire.kernels.cpu.vector.simd_ir import V_F32, V_I32, fold


class _Int32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="int32x16")


int32x16 = _Int32x16()


@register_model(_Int32x16)
class _Int32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: types.Type) -> None:
        super().__init__(manager, numba_type, V_I32)


_F, _V, _INT = float32x16, int32x16, types.int64

# --- memory: so many bytes, spread over the lanes again and again, or lanes so far apart or'ed into them ---------------

load_16_bytes: Any = operation(emit.load_bytes(16), _V, _INT)
load_8_bytes: Any = operation(emit.load_bytes(8), _V, _INT)
load_4_bytes: Any = operation(emit.load_bytes(4), _V, _INT)
store_16_bytes: Any = operation(emit.store_bytes(16), types.void, _INT, _V)
store_8_bytes: Any = operation(emit.store_bytes(8), types.void, _INT, _V)
store_4_bytes: Any = operation(emit.store_bytes(4), types.void, _INT, _V)
load_u8: Any = operation(emit.load_unsigned(8), _INT, _INT)
load_u16: Any = operation(emit.load_unsigned(16), _INT, _INT)
store_u8: Any = operation(emit.store_unsigned(8), types.void, _INT, _INT)
store_u16: Any = operation(emit.store_unsigned(16), types.void, _INT, _INT)

# --- bfloat16 numbers by codes of four bits, where ``simd.bf16_products_usable`` ------------------------------------------

bf16_table: Any = operation(emit.bf16_table, _F, _F)
store_looked_up: Any = operation(emit.store_looked_up, types.void, _INT, _INT, _F, _INT)

# --- integer lanes ----------------------------------------------------------------------------------------------------

lane_numbers: Any = operation(emit.lane_numbers, _V)  # 0, 1, ... 15
splat: Any = operation(emit.splat_integer, _V, _INT)
add: Any = operation(lambda builder, a, b: builder.add(a, b), _V, _V, _V)
sub: Any = operation(lambda builder, a, b: builder.sub(a, b), _V, _V, _V)
mul: Any = operation(lambda builder, a, b: builder.mul(a, b), _V, _V, _V)
both: Any = operation(lambda builder, a, b: builder.and_(a, b), _V, _V, _V)
either: Any = operation(lambda builder, a, b: builder.or_(a, b), _V, _V, _V)
shift_left: Any = operation(lambda builder, a, b: builder.shl(a, b), _V, _V, _V)  # by less than 32
shift_right: Any = operation(lambda builder, a, b: builder.lshr(a, b), _V, _V, _V)

# --- between integers and floats --------------------------------------------------------------------------------------

to_float: Any = operation(lambda builder, a: builder.sitofp(a, V_F32), _F, _V)
round_to_integer: Any = operation(emit.round_to_integer, _V, _F)
to_e4m3: Any = operation(emit.to_e4m3, _V, _F)
from_e4m3: Any = operation(emit.from_e4m3, _F, _V)
bits_of: Any = operation(emit.bits_of, _INT, types.float32)
float_of: Any = operation(emit.float_of, types.float32, _INT)

# --- floats -----------------------------------------------------------------------------------------------------------

minimum: Any = operation(emit.minimum, _F, _F, _F)  # b where either is NaN, as simd.maximum
min_lanes: Any = operation(fold(emit.minimum), types.float32, _F)
any_nan: Any = operation(emit.any_nan, types.boolean, _F)
first_equal: Any = operation(emit.first_equal, _INT, _F, types.float32)
rotate: Any = operation(emit.rotate, _F, _F)
