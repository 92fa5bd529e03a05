"""Whole groups of 4 or 8 bits straight to bfloat16 on CPUs with AVX-512: what streamed weights are made of while others compute.

The bytes are ``decode_groups``'s, in fewer instructions, because they are not made number by number:

    4 bits   a group has sixteen numbers at most. They are computed once, rounded, and looked up by code, 32 at a time
    8 bits   AVX512-BF16 rounds, in one instruction for 32 numbers. It takes subnormal numbers for zero; none can appear
             where scale and zero (if not 0) are at least 2^-100: with 8 bits of mantissa both are multiples of 2^-107, and
             so is what is made of them. Other groups are rounded as everywhere

On one core of a Zen 4, 3.5 million numbers in groups of 64 in cache, in GB/s of bfloat16: 4 bits 35, where ``decode_groups``
has 11; 8 bits 32, and 11.
"""

from tightwire.kernels.cpu.block_quant_word import SYMMETRIC, code_bits, group_elems, has_zeros, max_level, plane_bytes
from tightwire.kernels.cpu.vector import simd, simd_codes
from tightwire.kernels.cpu.vector.jit import helper
from tightwire.kernels.cpu.vector.simd import LANES
from tightwire.kernels.spec.block_format import BlockFormat

_AT_ONCE = 2 * LANES  # numbers of 16 bits in a register
_LEAST_EXPONENT, _END_EXPONENT = 27 << 7, 255 << 7  # of bfloat16 numbers: 2^-100, and infinity's


def decodes_to_bf16(fmt: BlockFormat) -> bool:
    """Whether this CPU has what it takes, and the format is one of those that are decoded here."""
    if not simd.bf16_products_usable() or fmt.hadamard or fmt.spikes or fmt.float8:
        return False
    return fmt.bits == 8 or (fmt.bits == 4 and fmt.plane_bytes[0] >= _AT_ONCE)


@helper
def decode_groups_to_bf16(target: int, source: int, word: int, num_groups: int, start: int, stop: int) -> None:
    """Groups ``start`` to ``stop``, all of them whole, of the message at ``source``, into the bfloat16 numbers at ``target``."""
    size, num_bytes = group_elems(word), plane_bytes(word)
    scales = source + num_groups * num_bytes
    zeros = scales + 2 * num_groups
    level = simd_codes.splat(max_level(word) if word & SYMMETRIC else 0)
    codes = simd_codes.sub(simd_codes.lane_numbers(), level)
    for group in range(start, stop):
        scale_bits = simd_codes.load_u16(scales + 2 * group)
        # Adding -0 changes nothing, not even a -0.
        zero_bits = simd_codes.load_u16(zeros + 2 * group) if has_zeros(word) else 0x8000
        scale = simd.splat(simd_codes.float_of(scale_bits << 16))
        zero = simd.splat(simd_codes.float_of(zero_bits << 16))
        out, plane = target + 2 * size * group, source + num_bytes * group
        if code_bits(word) == 4:
            table = simd_codes.bf16_table(simd.fma(simd_codes.to_float(codes), scale, zero))
            for at in range(0, num_bytes, _AT_ONCE):
                simd_codes.store_looked_up(out + 2 * at, out + 2 * (num_bytes + at), table, plane + at)
        else:
            is_plain = _is_plain(scale_bits) and (_is_plain(zero_bits) or zero_bits & 0x7FFF == 0)
            for at in range(0, size, _AT_ONCE):
                first = _number(plane + at, level, scale, zero)
                second = _number(plane + at + LANES, level, scale, zero)
                if is_plain:
                    simd.store_two_bf16(out + 2 * at, first, second)
                else:
                    simd.store_bf16(out + 2 * at, first)
                    simd.store_bf16(out + 2 * (at + LANES), second)


@helper
def _number(codes: int, level: simd.Vector, scale: simd.Vector, zero: simd.Vector) -> simd.Vector:
    code = simd_codes.sub(simd_codes.load_16_bytes(codes), level)
    return simd.fma(simd_codes.to_float(code), scale, zero)


@helper
def _is_plain(bits: int) -> bool:
    """A bfloat16 number that is finite and at least 2^-100 in size."""
    size = bits & 0x7FFF
    return _LEAST_EXPONENT <= size < _END_EXPONENT
