"""One group's bytes back to numbers: ``block_quant``'s specification on vectors."""

import numpy as np

from tightwire.kernels.cpu.block_quant_word import (
    FLOAT8,
    SPIKES,
    SYMMETRIC,
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

_MINUS_ZERO = np.float32(-0.0)


@helper
def decode_group(stage: int, source: int, num_groups: int, word: int, group: int) -> None:
    """All of group ``group`` of the message at ``source``, still rotated when the format rotates."""
    size, low_bits = group_elems(word), low_plane_bits(word)
    high_bits = code_bits(word) - low_bits
    low_bytes, high_bytes = (size >> 3) * low_bits, (size >> 3) * high_bits
    low_plane = source + group * low_bytes
    high_plane = source + num_groups * low_bytes + group * high_bytes
    scales = source + num_groups * plane_bytes(word)
    zeros = scales + 2 * num_groups
    scale = simd.splat(_load_bf16(scales + 2 * group))
    # Adding -0 changes nothing, not even a -0.
    zero = simd.splat(_load_bf16(zeros + 2 * group) if has_zeros(word) else _MINUS_ZERO)
    level = simd_codes.splat(max_level(word) if word & SYMMETRIC else 0)
    if is_simple(word):
        _decode_plane(stage, low_plane, scale, zero, level, word)
        return
    low_within, high_within = shifts_in_vector(low_bytes, low_bits), shifts_in_vector(high_bytes, high_bits)
    low_mask, high_mask = simd_codes.splat((1 << low_bits) - 1), simd_codes.splat((1 << high_bits) - 1)
    high_shift = simd_codes.splat(low_bits)
    for at in range(0, size, LANES):
        code = _unpacked(low_plane, low_bytes, low_bits, low_within, low_mask, at, word)
        if high_bits:
            high = _unpacked(high_plane, high_bytes, high_bits, high_within, high_mask, at, word)
            code = simd_codes.either(code, simd_codes.shift_left(high, high_shift))
        value = simd_codes.from_e4m3(code) if word & FLOAT8 else simd_codes.to_float(simd_codes.sub(code, level))
        simd.store(stage + 4 * at, simd.fma(value, scale, zero))
    if word & SPIKES:
        values = zeros + 2 * num_groups + 2 * group
        places = zeros + 6 * num_groups + group
        # Masked, so that a damaged message writes into the stage only.
        low_place = simd_codes.load_u8(places) & (size - 1)
        high_place = simd_codes.load_u8(places + num_groups) & (size - 1)
        simd.store_scalar(stage + 4 * low_place, _load_bf16(values))
        simd.store_scalar(stage + 4 * high_place, _load_bf16(values + 2 * num_groups))


@helper
def _decode_plane(stage: int, plane: int, scale: simd.Vector, zero: simd.Vector, level: simd.Vector, word: int) -> None:
    """Simple formats: every field of the bytes in turn."""
    bits, num_bytes = code_bits(word), plane_bytes(word)
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
    places = simd_codes.add(within, simd_codes.splat(field_shift(at, bits, word)))
    return simd_codes.both(simd_codes.shift_right(bytes_of_lanes, places), mask)
