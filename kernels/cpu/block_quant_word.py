"""A block format as one integer, its *word*, and what CPU kernels read from it: ``BlockFormat``'s properties for them."""

from tightwire.kernels.cpu.vector import simd, simd_codes
from tightwire.kernels.cpu.vector.jit import helper
from tightwire.kernels.cpu.vector.simd import LANES
from tightwire.kernels.spec.block_format import BlockFormat

SYMMETRIC, HADAMARD, SPIKES, FLOAT8 = 1 << 16, 1 << 17, 1 << 18, 1 << 19
_GROUP_SHIFT = 8


def format_word(fmt: BlockFormat) -> int:
    """Bits in the lowest byte, the logarithm of the group above it, then the flags."""
    flags = fmt.symmetric * SYMMETRIC | fmt.hadamard * HADAMARD | fmt.spikes * SPIKES | fmt.float8 * FLOAT8
    return fmt.bits | (fmt.group_elems.bit_length() - 1) << _GROUP_SHIFT | flags


@helper
def code_bits(word: int) -> int:
    return word & 0xFF


@helper
def log2_group_elems(word: int) -> int:
    return (word >> _GROUP_SHIFT) & 0xFF


@helper
def group_elems(word: int) -> int:
    return 1 << log2_group_elems(word)


@helper
def is_rotated(word: int) -> bool:
    return word & HADAMARD != 0


@helper
def has_zeros(word: int) -> bool:
    return word & (SYMMETRIC | FLOAT8) == 0


@helper
def max_level(word: int) -> int:
    return (1 << (code_bits(word) - 1)) - 1


@helper
def low_plane_bits(word: int) -> int:
    """Width of the first plane; what is left of the code's bits, if any, is the second."""
    bits = code_bits(word)
    return 8 if bits == 8 else 4 if bits >= 4 else 2


@helper
def plane_bytes(word: int) -> int:
    """Bytes of one group in all planes."""
    return (group_elems(word) >> 3) * code_bits(word)


@helper
def is_simple(word: int) -> bool:
    """One plane of integers in which whole vectors share bytes: the formats used most, and a shorter way."""
    bits = code_bits(word)
    return low_plane_bits(word) == bits and group_elems(word) * bits >= 8 * LANES and word & (SPIKES | FLOAT8) == 0


@helper
def field_shift(at: int, bits: int, word: int) -> int:
    """Where number ``at`` has its field in its byte of a plane: bits * (at // S), S = g * bits / 8, all powers of two."""
    return (at << 3 >> log2_group_elems(word)) & -bits


@helper
def shifts_in_vector(num_bytes: int, bits: int) -> simd.Vector:
    """Of the lanes' fields in their bytes, when number 0 is in lane 0."""
    log2_bytes = 4 if num_bytes >= 16 else 3 if num_bytes == 8 else 2
    fields = simd_codes.shift_right(simd_codes.lane_numbers(), simd_codes.splat(log2_bytes))
    return simd_codes.mul(fields, simd_codes.splat(bits))
