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

from dataclasses import dataclass
from itertools import accumulate

_PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
_GROUPS = (32, 64, 128)
MAX_GROUP_ELEMS = 128  # a whole number of groups of every format

MIN_SCALE = 2.0**-126  # float32's smallest normal number: its inverse is finite
FLOAT8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way to quantize in groups; ValueError for an unknown option, or two that cannot be combined."""

    bits: int  # width of a code
    group_elems: int = 128  # numbers that share a scale
    symmetric: bool = False  # codes around zero and no zero point, two bytes a group less
    hadamard: bool = False  # rotate each group first, which spreads an outlier over it
    float8: bool = False  # codes are e4m3 floats instead of integers

    def __post_init__(self) -> None:
        if self.bits not in _PLANES:
            raise ValueError(f"bits must be one of {sorted(_PLANES, reverse=True)}, got {self.bits}")
        if self.group_elems not in _GROUPS:
            raise ValueError(f"group_elems must be one of {list(_GROUPS)}, got {self.group_elems}")
        if self.float8 and (self.bits != 8 or self.symmetric or self.hadamard):
            raise ValueError("float8 needs 8 bits, without symmetric or hadamard")

    @property
    def plane_bits(self) -> tuple[int, ...]:
        """Widths of the planes, low bits first."""
        return _PLANES[self.bits]

    @property
    def plane_shifts(self) -> tuple[int, ...]:
        """The code's bit at which each plane begins."""
        return tuple(accumulate(self.plane_bits, initial=0))[:-1]

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """S of each plane: its bytes in one group."""
        return tuple(self.group_elems * bits // 8 for bits in self.plane_bits)

    @property
    def has_zeros(self) -> bool:
        return not (self.symmetric or self.float8)

    @property
    def max_code(self) -> int:
        """The largest code (integer formats); the smallest is 0."""
        return 2**self.bits - 1

    @property
    def num_levels(self) -> int:
        """Symmetric formats: levels below zero; there is one less above. A code is its level plus this."""
        return 2 ** (self.bits - 1)

    @property
    def group_bytes(self) -> int:
        """Bytes of one group in all sections."""
        return sum(self.plane_bytes) + 2 + 2 * self.has_zeros

    def num_groups(self, num_elems: int) -> int:
        return -(-num_elems // self.group_elems)

    def encoded_bytes(self, num_elems: int) -> int:
        """ceil(n / g) group_bytes: g b / 8 for the codes, 4 for scale and zero (2 without zero)."""
        return self.num_groups(num_elems) * self.group_bytes

    def carried_elems(self, num_elems: int) -> int:
        """The numbers of whole groups, whose rounding errors an encoder may carry into the next sum."""
        return self.num_groups(num_elems) * self.group_elems

    def section_starts(self, num_elems: int) -> tuple[int, ...]:
        """Offset of every section: the planes, then scales and, if the format has them, zeros."""
        num_groups = self.num_groups(num_elems)
        return tuple(offset * num_groups for offset in self.section_offsets)

    @property
    def section_offsets(self) -> tuple[int, ...]:
        """``section_starts`` of a tensor of one group; those of G groups are G times these."""
        sizes = [*self.plane_bytes, 2, *([2] if self.has_zeros else [])]
        return tuple(accumulate(sizes, initial=0))[:-1]
