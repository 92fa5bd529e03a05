"""The byte layout of block-quantized tensors, for all encoders and decoders.

A tensor of n numbers is cut into G = ceil(n / g) groups of g; the last group is filled up with copies of the last number.
Each group keeps one code of b bits for every number and a few 16-bit numbers of its own. The bytes are, in this order,
each section whole for all groups before the next begins:

    planes     the codes cut into planes of 8, 4, 2 or 1 bits, low bits first (6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1). Of a
               plane of p bits a group has S = g p / 8 bytes: number e is in byte e % S, at bit p (e // S)
    scales     bfloat16
    zeros      bfloat16; asymmetric formats only

So numbers that share a byte are S apart: vector code packs whole registers and never moves a lane. All sections have even
addresses when the first byte has one.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

# The widths of codes, and of their planes. Names, kernels and tests know the widths from here; ``with_shape``
# in kernels/cpu/native/codec/codec.h alone repeats them.
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
GROUPS = (32, 64, 128)
MAX_GROUP_ELEMS = 128  # a whole number of groups of every format

MIN_SCALE = 2.0**-126  # float32's smallest normal number: its inverse is finite
FLOAT8_MAX = 448.0


def _computed() -> Any:
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way to quantize in groups; ValueError for an unknown option, or two that cannot be combined."""

    bits: int  # width of a code
    group_elems: int = 128  # numbers that share a scale
    symmetric: bool = False  # codes around zero and no zero point, two bytes a group less
    hadamard: bool = False  # rotate each group first, which spreads an outlier over it
    float8: bool = False  # codes are e4m3 floats instead of integers

    # Computed once: a sum over ranks asks for them dozens of times.
    plane_bits: tuple[int, ...] = _computed()  # widths of the planes, low bits first
    plane_shifts: tuple[int, ...] = _computed()  # the code's bit at which each plane begins
    plane_bytes: tuple[int, ...] = _computed()  # S of each plane: its bytes in one group
    has_zeros: bool = _computed()
    max_code: int = _computed()  # the largest code (integer formats); the smallest is 0
    num_levels: int = _computed()  # below zero, one less above; a code is its level plus this; 0 if not symmetric
    sum_offset: int = _computed()  # what sums of messages add to a level: 128 more than the code, 0 for float8
    section_offsets: tuple[int, ...] = _computed()  # of planes, scales and zeros in a message of one group
    group_bytes: int = _computed()  # g b / 8 for the codes of a group, and 4 for scale and zero (2 without zero)

    def __post_init__(self) -> None:
        if self.bits not in PLANES:
            raise ValueError(f"bits must be one of {sorted(PLANES, reverse=True)}, got {self.bits}")
        if self.group_elems not in GROUPS:
            raise ValueError(f"group_elems must be one of {list(GROUPS)}, got {self.group_elems}")
        if self.float8 and (self.bits != 8 or self.symmetric or self.hadamard):
            raise ValueError("float8 needs 8 bits, without symmetric or hadamard")
        plane_bits = PLANES[self.bits]
        plane_bytes = tuple(self.group_elems * bits // 8 for bits in plane_bits)
        has_zeros = not (self.symmetric or self.float8)
        *section_offsets, group_bytes = accumulate([*plane_bytes, 2, *([2] if has_zeros else [])], initial=0)
        computed = {
            "plane_bits": plane_bits,
            "plane_shifts": tuple(accumulate(plane_bits, initial=0))[:-1],
            "plane_bytes": plane_bytes,
            "has_zeros": has_zeros,
            "max_code": 2**self.bits - 1,
            "num_levels": self.symmetric * 2 ** (self.bits - 1),
            "sum_offset": 0 if self.float8 else self.symmetric * 2 ** (self.bits - 1) + 128,
            "section_offsets": tuple(section_offsets),
            "group_bytes": group_bytes,
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)

    def num_groups(self, num_elems: int) -> int:
        return -(-num_elems // self.group_elems)

    def encoded_bytes(self, num_elems: int) -> int:
        return -(-num_elems // self.group_elems) * self.group_bytes

    def carried_elems(self, num_elems: int) -> int:
        """The numbers of whole groups, whose rounding errors an encoder may carry into the next sum."""
        return -(-num_elems // self.group_elems) * self.group_elems
