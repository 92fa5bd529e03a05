"""One group of numbers to its bytes: ``block_quant``'s specification on vectors."""

import math

import numpy as np

from tightwire.kernels.cpu.block_quant_stage import MAX_GROUP
from tightwire.kernels.cpu.block_quant_word import (
    FLOAT8,
    SPIKES,
    code_bits,
    field_shift,
    group_elems,
    has_zeros,
    is_simple,
    low_plane_bits,
    max_level,
    plane_bytes,
    shifts_in_vector,
)
from tightwire.kernels.cpu.vector import simd, simd_codes
from tightwire.kernels.cpu.vector.jit import helper
from tightwire.kernels.cpu.vector.simd import LANES
from tightwire.kernels.spec.block_format import FLOAT8_MAX, MIN_SCALE

_make_codes = simd.make_stack(MAX_GROUP // 4)  # one byte for each number
_NAN_BF16 = 0x7FC0
_INF_BF16 = 0x7F80
_ROUND_TO_INTEGER = np.float32(1.5 * 2**23)  # what simd_codes.round_to_integer adds
_NAN, _INF = np.float32(math.nan), np.float32(math.inf)


@helper
def encode_group(target: int, num_groups: int, word: int, group: int, stage: int) -> None:
    """Write group ``group`` of the message of ``num_groups`` at ``target``; the stage is used up."""
    bits, size, level = code_bits(word), group_elems(word), max_level(word)
    scales = target + num_groups * plane_bytes(word)
    zeros = scales + 2 * num_groups
    low, high, finite = _extremes(stage, size)
    low_place, high_place, low_bits, high_bits = 0, 0, 0, 0
    if word & SPIKES:
        low_place, high_place = _first_place(stage, size, low), _first_place(stage, size, high)
        low_bits, high_bits = _nearest_bf16(low), _nearest_bf16(high)
        finite = finite and (low_bits & 0x7FFF) < _INF_BF16 and (high_bits & 0x7FFF) < _INF_BF16
        low, high = _extremes_of_others(stage, size, low_place, high_place)

    zero_bits = 0
    zero = np.float32(0.0)
    if has_zeros(word):
        zero_bits = _bf16_below(low + np.float32(0.0))
        zero = simd_codes.float_of(zero_bits << 16)
        span, top, level = high - zero, np.float32((1 << bits) - 1), 0
    else:
        span = max(abs(low), abs(high))
        top = np.float32(FLOAT8_MAX) if word & FLOAT8 else np.float32(level)
    scale_bits = (simd_codes.bits_of(max(span / top, np.float32(MIN_SCALE))) + 0xFFFF) >> 16
    scale = simd_codes.float_of(scale_bits << 16)
    inverse = np.float32(1.0) / scale
    if not (finite and top * scale + zero < _INF):
        # What follows then makes codes of 0.
        _clear(stage, size)
        zero, inverse, level = np.float32(0.0), np.float32(0.0), 0
        scale_bits, zero_bits = _NAN_BF16, 0
        low_bits, high_bits, low_place, high_place = _NAN_BF16, _NAN_BF16, 0, 0

    simd_codes.store_u16(scales + 2 * group, scale_bits)
    if has_zeros(word):
        simd_codes.store_u16(zeros + 2 * group, zero_bits)
    if is_simple(word):
        _encode_plane(target + group * plane_bytes(word), stage, zero, inverse, level, word)
        return
    if word & FLOAT8:
        _encode_floats(target + group * size, stage, inverse, word)
        return
    codes = _make_codes()
    _encode_numbers(codes, stage, zero, inverse, level, word)
    if word & SPIKES:
        # Their codes mean nothing, but all implementations write the same: they lie outside the range, mostly.
        _clamp_code(codes + low_place, simd.load_scalar(stage + 4 * low_place), zero, inverse, top)
        _clamp_code(codes + high_place, simd.load_scalar(stage + 4 * high_place), zero, inverse, top)
        values = zeros + 2 * num_groups + 2 * group
        places = zeros + 6 * num_groups + group
        simd_codes.store_u16(values, low_bits)
        simd_codes.store_u16(values + 2 * num_groups, high_bits)
        simd_codes.store_u8(places, low_place)
        simd_codes.store_u8(places + num_groups, high_place)
    _pack_planes(target, num_groups, word, group, codes)


# --- the range -----------------------------------------------------------------------------------------------------------


@helper
def _extremes(stage: int, size: int) -> tuple[float, float, bool]:
    """Smallest and largest of the numbers that are not NaN, and whether all are finite."""
    low, high = simd.splat(_INF), simd.splat(-_INF)
    zero = simd.splat(np.float32(0.0))
    check = zero  # 0 * x is NaN where x is NaN or infinite
    for at in range(stage, stage + 4 * size, 8 * LANES):
        a, b = simd.load(at), simd.load(at + 4 * LANES)
        low, high = simd_codes.minimum(b, simd_codes.minimum(a, low)), simd.maximum(b, simd.maximum(a, high))
        check = simd.fma(b, zero, simd.fma(a, zero, check))
    return simd_codes.min_lanes(low), simd.max_lanes(high), not simd_codes.any_nan(check)


@helper
def _extremes_of_others(stage: int, size: int, low_place: int, high_place: int) -> tuple[float, float]:
    """Smallest and largest of all numbers but those two."""
    low, high = simd.load_scalar(stage + 4 * low_place), simd.load_scalar(stage + 4 * high_place)
    simd.store_scalar(stage + 4 * low_place, _NAN)
    simd.store_scalar(stage + 4 * high_place, _NAN)
    others_low, others_high, _ = _extremes(stage, size)
    simd.store_scalar(stage + 4 * low_place, low)
    simd.store_scalar(stage + 4 * high_place, high)
    return others_low, others_high


@helper
def _first_place(stage: int, size: int, value: float) -> int:
    """Where the stage first has ``value``; 0 when nowhere, as in a group of NaN."""
    for at in range(0, size, LANES):
        lane = simd_codes.first_equal(simd.load(stage + 4 * at), value)
        if lane < LANES:
            return at + lane
    return 0


@helper
def _clear(stage: int, size: int) -> None:
    for at in range(stage, stage + 4 * size, 4 * LANES):
        simd.store(at, simd.splat(np.float32(0.0)))


@helper
def _nearest_bf16(value: float) -> int:
    bits = simd_codes.bits_of(value + np.float32(0.0))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@helper
def _bf16_below(value: float) -> int:
    bits = simd_codes.bits_of(value)
    return (bits + (0xFFFF if bits >> 31 else 0)) >> 16


# --- codes ---------------------------------------------------------------------------------------------------------------


@helper
def _encode_plane(target: int, stage: int, zero: float, inverse: float, level: int, word: int) -> None:
    """Simple formats: quantize and pack at once."""
    zeros, inverses, levels = simd.splat(zero), simd.splat(inverse), simd_codes.splat(level)
    bits, num_bytes = code_bits(word), plane_bytes(word)
    for byte in range(0, num_bytes, LANES):
        packed = _code(stage + 4 * byte, zeros, inverses, levels)
        number = stage + 4 * byte
        for shift in range(bits, 8, bits):
            number += 4 * num_bytes
            code = _code(number, zeros, inverses, levels)
            packed = simd_codes.either(packed, simd_codes.shift_left(code, simd_codes.splat(shift)))
        simd_codes.store_16_bytes(target + byte, packed)


@helper
def _code(numbers: int, zeros: simd.Vector, inverses: simd.Vector, levels: simd.Vector) -> simd.Vector:
    """Sixteen codes, in the lower 8 bits of the lanes; bits from 22 up hold something else.

    Nothing need be clamped: the roundings of the scale's inverse and of the product stay below half a step.
    """
    scaled = simd.mul(simd.sub(simd.load(numbers), zeros), inverses)
    return simd_codes.add(simd_codes.round_to_integer(scaled), levels)


@helper
def _encode_numbers(codes: int, stage: int, zero: float, inverse: float, level: int, word: int) -> None:
    """One byte for each number."""
    zeros, inverses, levels = simd.splat(zero), simd.splat(inverse), simd_codes.splat(level)
    for at in range(0, group_elems(word), LANES):
        simd_codes.store_16_bytes(codes + at, _code(stage + 4 * at, zeros, inverses, levels))


@helper
def _encode_floats(target: int, stage: int, inverse: float, word: int) -> None:
    inverses = simd.splat(inverse)
    for at in range(0, group_elems(word), LANES):
        code = simd_codes.to_e4m3(simd.mul(simd.load(stage + 4 * at), inverses))
        simd_codes.store_16_bytes(target + at, code)


@helper
def _clamp_code(code: int, value: float, zero: float, inverse: float, top: float) -> None:
    scaled = min(max((value - zero) * inverse, np.float32(0.0)), top)
    simd_codes.store_u8(code, simd_codes.bits_of(scaled + _ROUND_TO_INTEGER))


# --- planes --------------------------------------------------------------------------------------------------------------


@helper
def _pack_planes(target: int, num_groups: int, word: int, group: int, codes: int) -> None:
    plane, shift, bits = target, 0, low_plane_bits(word)
    while bits:
        num_bytes = (group_elems(word) >> 3) * bits
        _pack_plane(plane + group * num_bytes, num_bytes, bits, shift, codes, word)
        plane += num_groups * num_bytes
        shift += bits
        bits = code_bits(word) - shift


@helper
def _pack_plane(target: int, num_bytes: int, bits: int, shift: int, codes: int, word: int) -> None:
    """Bits ``shift`` to ``shift + bits`` of each code."""
    mask = simd_codes.splat((1 << bits) - 1)
    shifts = simd_codes.splat(shift)
    within = shifts_in_vector(num_bytes, bits)
    step = max(num_bytes, LANES)
    for byte in range(0, step, LANES):
        packed = simd_codes.splat(0)
        for at in range(byte, group_elems(word), step):
            field = simd_codes.both(simd_codes.shift_right(simd_codes.load_16_bytes(codes + at), shifts), mask)
            places = simd_codes.add(within, simd_codes.splat(field_shift(at, bits, word)))
            packed = simd_codes.either(packed, simd_codes.shift_left(field, places))
        _store_bytes(target + byte, num_bytes, packed)


@helper
def _store_bytes(target: int, num_bytes: int, value: simd.Vector) -> None:
    if num_bytes >= 16:
        simd_codes.store_16_bytes(target, value)
    elif num_bytes == 8:
        simd_codes.store_8_bytes(target, value)
    else:
        simd_codes.store_4_bytes(target, value)
