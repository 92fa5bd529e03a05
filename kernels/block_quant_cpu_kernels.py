"""Block quantization of one group at a time on vectors; ``block_quant_cpu`` runs over whole tensors.

A kernel knows a format by one integer, its *word* (``format_word``), and an encoded message by the address of its first
byte and the number of its groups. Between memory and codes a group's numbers lie as float32 in a *stage*, memory for
``MAX_GROUP`` of them that the caller has on its stack (``make_stage``):

    encode     ``load_group`` (widen, fill up the tail), ``rotate_group`` if the word says so, ``encode_group``
    decode     ``decode_group``, ``unrotate_group`` if the word says so, ``store_group`` or ``add_group``

Other kernels inline these, those of AllReduce over shared memory for instance. The bytes are ``block_quant``'s reference's.
"""

import math

import numpy as np

from tightwire.kernels import simd, simd_codes
from tightwire.kernels.block_format import FLOAT8_MAX, MIN_SCALE, BlockFormat
from tightwire.kernels.jit import helper
from tightwire.kernels.numbers import load_numbers, size_of, store_numbers
from tightwire.kernels.simd import LANES

MAX_GROUP = 128
make_stage = simd.make_stack(MAX_GROUP)
_make_codes = simd.make_stack(MAX_GROUP // 4)  # one byte for each number

_GROUP_SHIFT, _SYMMETRIC, _HADAMARD, _SPIKES, _FLOAT8 = 8, 1 << 16, 1 << 17, 1 << 18, 1 << 19
_NAN_BF16 = 0x7FC0
_INF_BF16 = 0x7F80
_ROUND_TO_INTEGER = np.float32(1.5 * 2**23)  # what simd_codes.round_to_integer adds
_NAN, _INF, _MINUS_ZERO = np.float32(math.nan), np.float32(math.inf), np.float32(-0.0)


def format_word(fmt: BlockFormat) -> int:
    """All of a format in one integer, for kernels."""
    flags = fmt.symmetric * _SYMMETRIC | fmt.hadamard * _HADAMARD | fmt.spikes * _SPIKES | fmt.float8 * _FLOAT8
    return fmt.bits | (fmt.group_elems.bit_length() - 1) << _GROUP_SHIFT | flags


# --- what a word says, as BlockFormat's properties of these names --------------------------------------------------------


@helper
def log2_group_elems(word: int) -> int:
    return (word >> _GROUP_SHIFT) & 0xFF


@helper
def group_elems(word: int) -> int:
    return 1 << log2_group_elems(word)


@helper
def is_rotated(word: int) -> bool:
    return word & _HADAMARD != 0


@helper
def has_zeros(word: int) -> bool:
    return word & (_SYMMETRIC | _FLOAT8) == 0


@helper
def max_level(word: int) -> int:
    return (1 << ((word & 0xFF) - 1)) - 1


@helper
def low_plane_bits(word: int) -> int:
    """Width of the first plane; what is left of the code's bits, if any, is the second."""
    bits = word & 0xFF
    return 8 if bits == 8 else 4 if bits >= 4 else 2


@helper
def plane_bytes(word: int) -> int:
    """Bytes of one group in all planes."""
    return (group_elems(word) >> 3) * (word & 0xFF)


# --- numbers and the stage -----------------------------------------------------------------------------------------------


@helper
def load_group(stage: int, source: int, kind: int, count: int, word: int) -> None:
    """The stage's numbers from ``source``; from ``count`` on (at least 1) the last number again and again."""
    size = group_elems(word)
    if count >= size:
        for at in range(0, size, LANES):
            simd.store(stage + 4 * at, load_numbers(source + size_of(kind) * at, kind, LANES))
        return
    for at in range(0, count, LANES):
        simd.store(stage + 4 * at, load_numbers(source + size_of(kind) * at, kind, count - at))
    fill_group(stage, count, word)


@helper
def fill_group(stage: int, count: int, word: int) -> None:
    """Numbers from ``count`` on (at least 1) become the one before them."""
    last = simd.load_scalar(stage + 4 * (count - 1))
    for at in range(count, group_elems(word)):
        simd.store_scalar(stage + 4 * at, last)


@helper
def store_group(target: int, kind: int, stage: int, count: int) -> None:
    """The first ``count`` numbers, rounded to nearest even."""
    whole = count & -LANES
    for at in range(0, whole, LANES):
        store_numbers(target + size_of(kind) * at, simd.load(stage + 4 * at), kind, LANES)
    if whole < count:
        store_numbers(target + size_of(kind) * whole, simd.load(stage + 4 * whole), kind, count - whole)


@helper
def add_group(sums: int, stage: int, count: int) -> None:
    """``sums`` (float32) += the first ``count`` numbers."""
    whole = count & -LANES
    for at in range(0, whole, LANES):
        simd.store(sums + 4 * at, simd.add(simd.load(sums + 4 * at), simd.load(stage + 4 * at)))
    if whole < count:
        part = simd.add(simd.load_part(sums + 4 * whole, count - whole), simd.load(stage + 4 * whole))
        simd.store_part(sums + 4 * whole, part, count - whole)


@helper
def rotate_group(stage: int, word: int) -> None:
    size = group_elems(word)
    for at in range(0, size, LANES):
        simd.store(stage + 4 * at, simd_codes.rotate(simd.load(stage + 4 * at)))
    stride = LANES
    while stride < size:
        for block in range(0, size, 2 * stride):
            for at in range(stage + 4 * block, stage + 4 * (block + stride), 4 * LANES):
                a, b = simd.load(at), simd.load(at + 4 * stride)
                simd.store(at, simd.add(a, b))
                simd.store(at + 4 * stride, simd.sub(a, b))
        stride *= 2


@helper
def unrotate_group(stage: int, word: int) -> None:
    rotate_group(stage, word)
    size = group_elems(word)
    factor = simd.splat(np.float32(1.0) / np.float32(size))
    for at in range(0, size, LANES):
        simd.store(stage + 4 * at, simd.mul(simd.load(stage + 4 * at), factor))


# --- encoding ------------------------------------------------------------------------------------------------------------


@helper
def encode_group(target: int, num_groups: int, word: int, group: int, stage: int) -> None:
    """Write group ``group`` of the message at ``target``; the stage is used up."""
    bits, size, level = word & 0xFF, group_elems(word), max_level(word)
    scales = target + num_groups * plane_bytes(word)
    zeros = scales + 2 * num_groups
    low, high, finite = _extremes(stage, size)
    low_place, high_place, low_bits, high_bits = 0, 0, 0, 0
    if word & _SPIKES:
        low_place, high_place = _first_place(stage, low), _first_place(stage, high)
        low_bits, high_bits = _nearest_bf16(low), _nearest_bf16(high)
        finite = finite and (low_bits & 0x7FFF) < _INF_BF16 and (high_bits & 0x7FFF) < _INF_BF16
        low_spike, high_spike = low, high
        simd.store_scalar(stage + 4 * low_place, _NAN)
        simd.store_scalar(stage + 4 * high_place, _NAN)
        low, high, _ = _extremes(stage, size)
        simd.store_scalar(stage + 4 * low_place, low_spike)
        simd.store_scalar(stage + 4 * high_place, high_spike)

    zero_bits = 0
    zero = np.float32(0.0)
    if has_zeros(word):
        zero_bits = _bf16_below(low + np.float32(0.0))
        zero = simd_codes.float_of(zero_bits << 16)
        span, top, level = high - zero, np.float32((1 << bits) - 1), 0
    else:
        span = max(abs(low), abs(high))
        top = np.float32(FLOAT8_MAX) if word & _FLOAT8 else np.float32(level)
    scale_bits = (simd_codes.bits_of(max(span / top, np.float32(MIN_SCALE))) + 0xFFFF) >> 16
    scale = simd_codes.float_of(scale_bits << 16)
    inverse = np.float32(1.0) / scale
    if not (finite and top * scale + zero < _INF):
        scale_bits, zero_bits, low_place, high_place, low_bits, high_bits, level = (
            _NAN_BF16,
            0,
            0,
            0,
            _NAN_BF16,
            _NAN_BF16,
            0,
        )
        zero, inverse = np.float32(0.0), np.float32(0.0)
        for at in range(0, size, LANES):
            simd.store(stage + 4 * at, simd.splat(np.float32(0.0)))
    simd_codes.store_u16(scales + 2 * group, scale_bits)
    if has_zeros(word):
        simd_codes.store_u16(zeros + 2 * group, zero_bits)

    if _is_simple(word):
        _encode_plane(target + group * plane_bytes(word), stage, zero, inverse, level, word)
        return
    if word & _FLOAT8:
        _encode_floats(target + group * size, stage, inverse, word)
        return
    codes = _make_codes()
    _encode_numbers(codes, stage, zero, inverse, level, word)
    if word & _SPIKES:
        # Spikes lie outside the range, or inside when the zero was rounded past them.
        minima = zeros + 2 * num_groups
        maxima = minima + 2 * num_groups
        places = maxima + 2 * num_groups
        simd_codes.store_u16(minima + 2 * group, low_bits)
        simd_codes.store_u16(maxima + 2 * group, high_bits)
        simd_codes.store_u8(places + group, low_place)
        simd_codes.store_u8(places + num_groups + group, high_place)
        _clamp_code(codes + low_place, simd.load_scalar(stage + 4 * low_place), zero, inverse, top)
        _clamp_code(codes + high_place, simd.load_scalar(stage + 4 * high_place), zero, inverse, top)
    _pack_planes(target, num_groups, word, group, codes)


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
def _first_place(stage: int, value: float) -> int:
    """Where the stage first has ``value``, which it has."""
    at = 0
    while True:
        lane = simd_codes.first_equal(simd.load(stage + 4 * at), value)
        if lane < LANES or at >= MAX_GROUP:
            return at + lane
        at += LANES


@helper
def _nearest_bf16(value: float) -> int:
    bits = simd_codes.bits_of(value + np.float32(0.0))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@helper
def _bf16_below(value: float) -> int:
    bits = simd_codes.bits_of(value)
    return (bits + (0xFFFF if bits >> 31 else 0)) >> 16


@helper
def _is_simple(word: int) -> bool:
    """One plane of integers in which whole vectors share bytes: the formats used most, and a shorter way."""
    bits = word & 0xFF
    return low_plane_bits(word) == bits and group_elems(word) * bits >= 8 * LANES and word & (_SPIKES | _FLOAT8) == 0


@helper
def _encode_plane(target: int, stage: int, zero: float, inverse: float, level: int, word: int) -> None:
    """Simple formats: quantize and pack at once."""
    zeros, inverses, levels = simd.splat(zero), simd.splat(inverse), simd_codes.splat(level)
    bits, num_bytes = word & 0xFF, plane_bytes(word)
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


@helper
def _pack_planes(target: int, num_groups: int, word: int, group: int, codes: int) -> None:
    size, low_bits = group_elems(word), low_plane_bits(word)
    high_bits = (word & 0xFF) - low_bits
    low_bytes, high_bytes = (size >> 3) * low_bits, (size >> 3) * high_bits
    _pack_plane(target + group * low_bytes, low_bytes, low_bits, 0, codes, word)
    if high_bits:
        _pack_plane(target + num_groups * low_bytes + group * high_bytes, high_bytes, high_bits, low_bits, codes, word)


@helper
def _pack_plane(target: int, num_bytes: int, bits: int, shift: int, codes: int, word: int) -> None:
    """Bits ``shift`` to ``shift + bits`` of each code."""
    mask = simd_codes.splat((1 << bits) - 1)
    shifts = simd_codes.splat(shift)
    within = _shifts_in_vector(num_bytes, bits)
    step = max(num_bytes, LANES)
    for byte in range(0, step, LANES):
        packed = simd_codes.splat(0)
        for at in range(byte, group_elems(word), step):
            field = simd_codes.both(simd_codes.shift_right(simd_codes.load_16_bytes(codes + at), shifts), mask)
            places = simd_codes.add(within, simd_codes.splat(_field_shift(at, bits, word)))
            packed = simd_codes.either(packed, simd_codes.shift_left(field, places))
        _store_bytes(target + byte, num_bytes, packed)


@helper
def _field_shift(at: int, bits: int, word: int) -> int:
    """Where number ``at`` has its field in its byte of a plane: bits * (at // S), S = g * bits / 8, all powers of two."""
    return (at << 3 >> log2_group_elems(word)) & -bits


@helper
def _shifts_in_vector(num_bytes: int, bits: int) -> simd.Vector:
    """Of the lanes' fields in their bytes, when number 0 is in lane 0."""
    log2_bytes = 4 if num_bytes >= 16 else 3 if num_bytes == 8 else 2
    fields = simd_codes.shift_right(simd_codes.lane_numbers(), simd_codes.splat(log2_bytes))
    return simd_codes.mul(fields, simd_codes.splat(bits))


@helper
def _store_bytes(target: int, num_bytes: int, value: simd.Vector) -> None:
    if num_bytes >= 16:
        simd_codes.store_16_bytes(target, value)
    elif num_bytes == 8:
        simd_codes.store_8_bytes(target, value)
    else:
        simd_codes.store_4_bytes(target, value)


# --- decoding ------------------------------------------------------------------------------------------------------------


@helper
def decode_group(stage: int, source: int, num_groups: int, word: int, group: int) -> None:
    """All of group ``group`` of the message at ``source``, still rotated when the format rotates."""
    size, low_bits = group_elems(word), low_plane_bits(word)
    high_bits = (word & 0xFF) - low_bits
    low_bytes, high_bytes = (size >> 3) * low_bits, (size >> 3) * high_bits
    low_plane = source + group * low_bytes
    high_plane = source + num_groups * low_bytes + group * high_bytes
    scales = source + num_groups * plane_bytes(word)
    zeros = scales + 2 * num_groups
    scale = simd.splat(_load_bf16(scales + 2 * group))
    # Adding -0 changes nothing, not even a -0.
    zero = simd.splat(_load_bf16(zeros + 2 * group) if has_zeros(word) else _MINUS_ZERO)
    level = simd_codes.splat(max_level(word) if word & _SYMMETRIC else 0)
    if _is_simple(word):
        _decode_plane(stage, low_plane, scale, zero, level, word)
        return
    low_within, high_within = _shifts_in_vector(low_bytes, low_bits), _shifts_in_vector(high_bytes, high_bits)
    low_mask, high_mask = simd_codes.splat((1 << low_bits) - 1), simd_codes.splat((1 << high_bits) - 1)
    high_shift = simd_codes.splat(low_bits)
    for at in range(0, size, LANES):
        code = _unpacked(low_plane, low_bytes, low_bits, low_within, low_mask, at, word)
        if high_bits:
            high = _unpacked(high_plane, high_bytes, high_bits, high_within, high_mask, at, word)
            code = simd_codes.either(code, simd_codes.shift_left(high, high_shift))
        value = simd_codes.from_e4m3(code) if word & _FLOAT8 else simd_codes.to_float(simd_codes.sub(code, level))
        simd.store(stage + 4 * at, simd.fma(value, scale, zero))
    if word & _SPIKES:
        minima = zeros + 2 * num_groups
        maxima = minima + 2 * num_groups
        places = maxima + 2 * num_groups
        # Masked, so that a damaged message writes into the stage only.
        low_place = simd_codes.load_u8(places + group) & (size - 1)
        high_place = simd_codes.load_u8(places + num_groups + group) & (size - 1)
        simd.store_scalar(stage + 4 * low_place, _load_bf16(minima + 2 * group))
        simd.store_scalar(stage + 4 * high_place, _load_bf16(maxima + 2 * group))


@helper
def _decode_plane(stage: int, plane: int, scale: simd.Vector, zero: simd.Vector, level: simd.Vector, word: int) -> None:
    """Simple formats: every field of the bytes in turn."""
    bits, num_bytes = word & 0xFF, plane_bytes(word)
    mask = simd_codes.splat((1 << bits) - 1)
    number = stage
    for shift in range(0, 8, bits):
        shifts = simd_codes.splat(shift)
        for byte in range(plane, plane + num_bytes, LANES):
            code = simd_codes.both(simd_codes.shift_right(simd_codes.load_16_bytes(byte), shifts), mask)
            simd.store(number, simd.fma(simd_codes.to_float(simd_codes.sub(code, level)), scale, zero))
            number += 4 * LANES


@helper
def _load_bf16(address: int) -> float:
    return simd_codes.float_of(simd_codes.load_u16(address) << 16)


@helper
def _unpacked(
    plane: int, num_bytes: int, bits: int, within: simd.Vector, mask: simd.Vector, at: int, word: int
) -> simd.Vector:
    """The fields of sixteen numbers from number ``at`` on."""
    if num_bytes >= 16:
        bytes_of_lanes = simd_codes.load_16_bytes(plane + (at & (num_bytes - 1)))
    elif num_bytes == 8:
        bytes_of_lanes = simd_codes.load_8_bytes(plane)
    else:
        bytes_of_lanes = simd_codes.load_4_bytes(plane)
    places = simd_codes.add(within, simd_codes.splat(_field_shift(at, bits, word)))
    return simd_codes.both(simd_codes.shift_right(bytes_of_lanes, places), mask)
