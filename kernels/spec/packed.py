"""Packed matrices: weights in 2 to 8 bits, made from floats and converted back.

The layout is ``gguf_blocks``'s. ``linear`` multiplies with such a matrix, ``kernels.packed`` converts rows to floats fast.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tightwire.kernels.spec.gguf_block_parts import parts_of
from tightwire.kernels.spec.gguf_blocks import GROUP_ELEMS, INTERLEAVED_ROWS, Q4_0, Q4_1, Q8_0, PackedFormat


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """(O, D) numbers as blocks: (O, bytes of a row) uint8, contiguous rows of whole blocks.

    In an ``interleaved`` matrix each full 16 rows lie side by side (native/linear/interleaved.h), in a ``by_plane`` one
    the codes of a row come before its scales (``cuda.packed_blocks.order_by_plane``).
    """

    blocks_OB: Tensor
    format: PackedFormat
    interleaved: bool = False
    by_plane: bool = False

    def __post_init__(self) -> None:
        blocks, block_bytes = self.blocks_OB, self.format.block_bytes
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % block_bytes or blocks.stride(1) != 1:
            needs = f"{self.format.name} needs (rows, bytes) uint8, contiguous, whole blocks of {block_bytes} bytes"
            raise ValueError(f"{needs}; got {tuple(blocks.shape)} {blocks.dtype} with strides {blocks.stride()}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks_OB.shape[0], self.blocks_OB.shape[1] // self.format.block_bytes * self.format.block_elems

    @property
    def device(self) -> torch.device:
        return self.blocks_OB.device

    @property
    def nbytes(self) -> int:
        return self.blocks_OB.nbytes

    def rows(self, first: int, stop: int) -> "PackedMatrix":
        """A view of some rows; of an interleaved matrix, whole sixteens."""
        if self.interleaved and (first % INTERLEAVED_ROWS or (stop % INTERLEAVED_ROWS and stop != len(self.blocks_OB))):
            raise ValueError(f"rows {first} to {stop} of an interleaved matrix are not whole {INTERLEAVED_ROWS}s")
        return replace(self, blocks_OB=self.blocks_OB[first:stop])

    def take(self, indices_T: Tensor) -> "PackedMatrix":
        """A copy of the rows with these indices; not of an interleaved matrix."""
        assert not self.interleaved
        return replace(self, blocks_OB=self.blocks_OB.index_select(0, indices_T))


Matrix = Tensor | PackedMatrix


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """(O, D): the rows of several packed matrices of one width, each in its own format."""

    parts: tuple[PackedMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def rows(self, first: int, stop: int) -> PackedMatrix:
        """A view of some rows of one part."""
        for part in self.parts:
            if first < len(part.blocks_OB):
                return part.rows(first, stop)
            first, stop = first - len(part.blocks_OB), stop - len(part.blocks_OB)
        raise IndexError(f"rows {first} to {stop} behind the last part")


Weight = Matrix | StackedMatrix


def quantize(x_OD: Tensor, packed: PackedFormat) -> PackedMatrix:
    """Each group's numbers as the nearest codes under the narrowest scale that reaches them all.

    Without a minimum: scale = max |x| / 127 (Q8_0) or / 7 (Q4_0), and codes on either side of zero. With one: minimum =
    min x, scale = (max x - minimum) / 15. The scale is rounded up to float16 and the minimum down, so nothing is clipped.

    The result is within half a scale, and the float32 roundings of x / scale and Q4_1's sum, of x.

    Raises:
        ValueError: rows that are not whole groups, or numbers that are not finite or too large for a float16 scale.
    """
    assert packed.kind in (Q8_0.kind, Q4_0.kind, Q4_1.kind), packed
    packed.row_bytes(x_OD.shape[1])
    x_OGN = x_OD.float().unflatten(1, (-1, GROUP_ELEMS))
    if packed.has_minimum:
        minimum_OG1 = -_float16_at_least(-x_OGN.amin(-1, keepdim=True))
        reach_OG1 = x_OGN.amax(-1, keepdim=True) - minimum_OG1.float()
        least, most, offset = 0, 15, 0
    else:
        minimum_OG1 = torch.zeros_like(x_OGN[..., :1], dtype=torch.float16)
        reach_OG1 = x_OGN.abs().amax(-1, keepdim=True)
        most = 2 ** (packed.bits - 1) - 1
        least, offset = -most, 0 if packed.bits == 8 else 8
    # Not by a number of Python: CUDA would multiply by its inverse, which may round to another scale.
    scale_OG1 = _float16_at_least(reach_OG1 / reach_OG1.new_full((), most))
    if not bool((scale_OG1.isfinite() & minimum_OG1.isfinite()).all()):
        raise ValueError(f"{packed.name} stores scales as float16; these numbers are too large, infinite or NaN")
    codes_OGN = ((x_OGN - minimum_OG1.float()) / scale_OG1.float()).round().clamp_(least, most)
    codes_OGN = codes_OGN.nan_to_num_(0.0).add_(offset)  # 0 / 0 where all are zero, or equal to the minimum
    if packed.bits == 8:
        codes_OGB = codes_OGN.to(torch.int8).view(torch.uint8)
    else:
        low_OGB, high_OGB = codes_OGN.to(torch.uint8).chunk(2, -1)
        codes_OGB = low_OGB | high_OGB << 4
    header = [scale_OG1, minimum_OG1] if packed.has_minimum else [scale_OG1]
    return PackedMatrix(torch.cat([*(number.view(torch.uint8) for number in header), codes_OGB], -1).flatten(1), packed)


def _float16_at_least(x: Tensor) -> Tensor:
    """The smallest float16 not below each float32."""
    near = x.half()
    bits = near.view(torch.int16)
    # Of negative numbers the next one has a smaller magnitude.
    above = torch.where(bits < 0, bits - 1, bits + 1).view(torch.float16)
    return torch.where(near.float() < x, above, near)


def dequantize_reference(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """(O, D): the numbers of the blocks, computed in float32, rounded once to ``dtype``."""
    codes_OSN, scale_OS1, minimum_OS1 = block_parts(matrix)
    x_OSN = scale_OS1 * codes_OSN
    if minimum_OS1 is not None:
        x_OSN = x_OSN + minimum_OS1
    return x_OSN.flatten(1).to(dtype)


def block_parts(matrix: PackedMatrix) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes (O, S, ``scale_elems``) without bias, scales (O, S, 1) and minima (O, S, 1), all float32."""
    assert not (matrix.interleaved or matrix.by_plane)
    blocks_OGB = matrix.blocks_OB.unflatten(1, (-1, matrix.format.block_bytes))
    codes, scale, minimum = parts_of(blocks_OGB, matrix.format)
    return codes.flatten(1, 2), scale.flatten(1, 2), None if minimum is None else minimum.flatten(1, 2)
