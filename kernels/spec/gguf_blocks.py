"""The byte layout of packed matrices: blocks of numbers along a row, each with its own scales, as in GGUF files.

A row of D numbers is D / 32 blocks of 32 numbers, or D / 256 superblocks of 256, without gaps, and rows follow without gaps.
Bytes in memory are those of the file. A number is

    x = scale code + minimum

where ``scale_elems`` numbers share a scale and a minimum (0 in most formats). In superblocks these are a float16 times an
integer of 4 to 8 bits. Codes have a bias taken off, or are looked up in a table of sixteen integers:

             bytes  before and behind the codes                  code                     scale, minimum
    Q8_0        34  d                                            int8                     d
    Q4_0        18  d                                            4 bits - 8               d
    Q4_1        20  d, m                                         4 bits                   d, m
    Q5_0        22  d                                            5 bits - 16              d
    Q5_1        24  d, m                                         5 bits                   d, m
    IQ4_NL      18  d                                            table of 4 bits          d
    MXFP4       17  exponent e, 8 bits                           table of 4 bits          2^(e - 128)
    Q2_K        84  16 x 8 bits (s, t); behind: d, m             2 bits                   d s, -m t
    Q3_K       110  behind: 16 x 6 bits s, d                     3 bits - 4               d (s - 32)
    Q4_K       144  d, m, 8 x 12 bits (s, t)                     4 bits                   d s, -m t
    Q5_K       176  d, m, 8 x 12 bits (s, t)                     5 bits                   d s, -m t
    Q6_K       210  behind: 16 x int8 s, d                       6 bits - 32              d s
    IQ4_XS     136  d, 8 x 6 bits s                              table of 4 bits          d (s - 32)

x is computed in float32. Scales and products of scale and code are exact there (at most 24 bits), so x is rounded once, when
a minimum is added, fused or not; without one it is not rounded.

Source: ggml/src/ggml-common.h of llama.cpp, and dequantize_row_* of ggml-quants.c; ``gguf_block_parts`` reads the bits.
"""

from dataclasses import dataclass
from functools import partial

GROUP_ELEMS = 32
SUPERBLOCK_ELEMS = 256
INTERLEAVED_ROWS = 16  # rows of an interleaved matrix (native/linear/interleaved.h) that lie side by side

IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Codes:
    """Where a block has its codes, and what a code stands for.

    The low bits are a plane: the lowest bits of ``run`` bytes, then their next bits, and so on, then the next bytes. Some formats
    have the high bits in a plane of their own.
    """

    at: int
    run: int
    bits: int = 4
    high_at: int = 0
    high_run: int = 0
    high_bits: int = 0
    fifths_at: int = 0  # four bytes of fifth bits, in order
    offset: int = 0
    table: tuple[int, ...] = ()

    @property
    def are_bits(self) -> bool:
        """Whether codes stand in planes alone, and have less than a byte."""
        return self.bits < 8 and not (self.fifths_at or self.table)

    def planes(self, block_elems: int) -> list[range]:
        """The bytes of each plane; the others of a block are scales."""
        found = [(self.at, block_elems * self.bits // 8), (self.high_at, block_elems * self.high_bits // 8)]
        found.append((self.fifths_at, 4 if self.fifths_at else 0))
        return [range(at, at + num_bytes) for at, num_bytes in found if num_bytes]


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One kind of block, under GGUF's name."""

    name: str
    kind: int  # its integer in kernels, where plain numbers have 0 to 2
    codes: Codes
    block_bytes: int
    floats_at: int = 0  # where the float16 d is in a block, and m behind it
    block_elems: int = GROUP_ELEMS
    scale_elems: int = GROUP_ELEMS
    has_minimum: bool = False
    int8_activations: bool = False  # products round activations to 8 bits (packed_int8); the bytes are the same

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.codes.bits + self.codes.high_bits + (self.codes.fifths_at > 0)

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of a row; ValueError if it is not whole blocks."""
        if num_columns % self.block_elems:
            raise ValueError(f"{self.name} packs rows of whole blocks of {self.block_elems} numbers, got {num_columns}")
        return num_columns // self.block_elems * self.block_bytes


Q8_0 = PackedFormat("Q8_0", 3, Codes(2, 32, bits=8), block_bytes=34)
Q4_0 = PackedFormat("Q4_0", 4, Codes(2, 16, offset=8), block_bytes=18)
Q4_1 = PackedFormat("Q4_1", 5, Codes(4, 16), block_bytes=20, has_minimum=True)
Q5_0 = PackedFormat("Q5_0", 6, Codes(6, 16, fifths_at=2, offset=16), block_bytes=22)
Q5_1 = PackedFormat("Q5_1", 7, Codes(8, 16, fifths_at=4), block_bytes=24, has_minimum=True)
IQ4_NL = PackedFormat("IQ4_NL", 8, Codes(2, 16, table=IQ4_TABLE), block_bytes=18)
MXFP4 = PackedFormat("MXFP4", 9, Codes(1, 16, table=MXFP4_TABLE), block_bytes=17)
_Q3_K = Codes(32, 32, bits=2, high_run=32, high_bits=1, offset=4)
_Q5_K = Codes(48, 32, high_at=16, high_run=32, high_bits=1)
_Q6_K = Codes(0, 64, high_at=128, high_run=32, high_bits=2, offset=32)
_superblock = partial(PackedFormat, block_elems=SUPERBLOCK_ELEMS)
_floats_behind = partial(_superblock, scale_elems=16)
Q2_K = _floats_behind("Q2_K", 10, Codes(16, 32, bits=2), block_bytes=84, floats_at=80, has_minimum=True)
Q3_K = _floats_behind("Q3_K", 11, _Q3_K, block_bytes=110, floats_at=108)
Q4_K = _superblock("Q4_K", 12, Codes(16, 32), block_bytes=144, has_minimum=True)
Q5_K = _superblock("Q5_K", 13, _Q5_K, block_bytes=176, has_minimum=True)
Q6_K = _floats_behind("Q6_K", 14, _Q6_K, block_bytes=210, floats_at=208)
IQ4_XS = _superblock("IQ4_XS", 15, Codes(8, 16, table=IQ4_TABLE), block_bytes=136)
PACKED_FORMATS = {
    packed.name: packed
    for packed in (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS)
}
