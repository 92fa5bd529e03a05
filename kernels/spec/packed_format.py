"""The byte layout of packed matrices: groups of 32 numbers along a row, each with its own scale, as in GGUF files.

A row of D numbers, D a multiple of 32, is D / 32 blocks without gaps, and rows follow without gaps. A block is

    Q8_0  34 bytes: scale float16; 32 codes int8                                          x = scale code
    Q4_0  18 bytes: scale float16; 16 bytes of two codes each                             x = scale (code - 8)
    Q4_1  20 bytes: scale float16; minimum float16; 16 bytes of two codes each            x = scale code + minimum

Of two codes in byte i, number i has the lower half and number 16 + i the upper, so that sixteen lanes widen sixteen bytes
and then mask or shift, and nothing moves between lanes.

x is computed in float32. A product of scale and code is exact there (11 and 8 bits), so Q4_1 rounds once, when the minimum
is added, fused or not; the others do not round.

Source: block_q8_0, block_q4_0 and block_q4_1 of llama.cpp, ggml/src/ggml-common.h.
"""

from dataclasses import dataclass

GROUP_ELEMS = 32
INTERLEAVED_ROWS = 16  # rows of an interleaved matrix (packed_int8) that lie side by side


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One kind of block, under GGUF's name."""

    name: str
    kind: int  # its integer in kernels, where plain numbers have 0 to 2
    bits: int
    has_minimum: bool = False
    int8_activations: bool = False  # products round activations to 8 bits (packed_int8); the bytes are the same

    @property
    def header_bytes(self) -> int:
        """Scale and minimum, in front of the codes."""
        return 4 if self.has_minimum else 2

    @property
    def block_bytes(self) -> int:
        return self.header_bytes + GROUP_ELEMS * self.bits // 8

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of a row; ValueError if it is not whole groups."""
        if num_columns % GROUP_ELEMS:
            raise ValueError(f"{self.name} packs rows of whole groups of {GROUP_ELEMS} numbers, got {num_columns}")
        return num_columns // GROUP_ELEMS * self.block_bytes


Q8_0 = PackedFormat("Q8_0", kind=3, bits=8)
Q4_0 = PackedFormat("Q4_0", kind=4, bits=4)
Q4_1 = PackedFormat("Q4_1", kind=5, bits=4, has_minimum=True)
PACKED_FORMATS = {packed.name: packed for packed in (Q8_0, Q4_0, Q4_1)}
