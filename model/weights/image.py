"""How a rank's tensors of one layer lie in one piece of memory, to be moved as such: each at a fixed place, in order.

There are two kinds of images of a layer. Plain: the tensors as the kernels read them; a buffer with such an image in it can be
computed with. Encoded: matrices of plain numbers as a codec's bytes, fewer to move, which ``decode`` makes a plain image of.
Packed matrices, norms and biases are the same in both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tightwire.comm.buffers import PAGE_BYTES, page_aligned
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.kernels.spec.packed_format import PackedFormat
from tightwire.model.weights.formats import WeightFormats
from tightwire.model.weights.fused import Fused
from tightwire.model.weights.source import LayerWeights

_ALIGNED = 64  # a cache line, and whatever a kernel may want of an address

_PLAIN = parse_codec("none")


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's place."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    packed: PackedFormat | None
    codec: Codec

    @property
    def num_elems(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Image:
    """The places of a layer's tensors, by their fields in ``LayerWeights`` (or ``OuterWeights``)."""

    pieces: Mapping[str, Piece]
    dtype: torch.dtype  # of plain numbers
    num_bytes: int  # whole pages, so that a file of images can be read around the page cache

    @property
    def is_plain(self) -> bool:
        return all(piece.codec.exact for piece in self.pieces.values())

    def tensors(self, buffer: Tensor) -> dict[str, Matrix]:
        """Views into a buffer that holds, or is to hold, this image.

        Raises:
            ValueError: the image is encoded.
        """
        if not self.is_plain:
            raise ValueError("an encoded image has no tensors; decode it first")
        return {field: self._view(piece, buffer) for field, piece in self.pieces.items()}

    def encode(self, plain: "Image", source: Tensor, out: Tensor) -> None:
        """Fill ``out`` with this image of the layer whose plain image ``source`` holds. What lies between pieces is 0."""
        out[: self.num_bytes].zero_()
        for (whole, piece), mine in self._beside(plain, source, out):
            if piece.codec.exact:
                mine.copy_(whole)
            else:
                piece.codec.encode(whole.view(self.dtype), mine)

    def decode(self, source: Tensor, plain: "Image", out: Tensor) -> None:
        """Fill ``out`` with the plain image of the layer whose image of this kind ``source`` holds. Allocates nothing."""
        for (whole, piece), mine in self._beside(plain, out, source):
            if piece.codec.exact:
                whole.copy_(mine)
            else:
                piece.codec.decode(mine, piece.num_elems, self.dtype, whole.view(self.dtype))

    def _beside(
        self, plain: "Image", plain_bytes: Tensor, own_bytes: Tensor
    ) -> Iterator[tuple[tuple[Tensor, Piece], Tensor]]:
        for field, piece in self.pieces.items():
            other = plain.pieces[field]
            yield (
                (plain_bytes[other.offset : other.offset + other.num_bytes], piece),
                own_bytes[piece.offset : piece.offset + piece.num_bytes],
            )

    def _view(self, piece: Piece, buffer: Tensor) -> Matrix:
        piece_bytes = buffer[piece.offset : piece.offset + piece.num_bytes]
        if piece.packed is not None:
            return PackedMatrix(piece_bytes.view(piece.shape[0], -1), piece.packed)
        return piece_bytes.view(self.dtype).view(piece.shape)


def layer_on_device(stored: Image, plain: Image, source: Tensor, device: torch.device) -> LayerWeights:
    """The layer whose ``stored`` image ``source`` holds, which may become part of it.

    Cost: the plain image's bytes on ``device``, and for a while the stored one's where it is encoded.
    """
    kept = source.to(device)
    if not stored.is_plain:
        encoded, kept = kept, page_aligned(plain.num_bytes, device)
        stored.decode(encoded, plain, kept)
    tensors: dict[str, Any] = plain.tensors(kept)
    return LayerWeights(**tensors)


def make_image(
    tensors: Mapping[str, Fused], formats: WeightFormats, dtype: torch.dtype, codec: Codec = _PLAIN
) -> Image:
    """The image of ``tensors``; with a codec, what is no vector and not packed goes through it."""
    pieces: dict[str, Piece] = {}
    offset = 0
    for field, fused in tensors.items():
        packed = formats.of(fused)
        own = codec if packed is None and fused.columns is not None else _PLAIN
        if packed is not None:
            num_bytes = fused.shape[0] * packed.row_bytes(fused.shape[1])
        else:
            num_bytes = own.wire_bytes(prod(fused.shape), dtype.itemsize)
        pieces[field] = Piece(offset, num_bytes, fused.shape, packed, own)
        offset += -(-num_bytes // _ALIGNED) * _ALIGNED
    return Image(pieces, dtype, -(-offset // PAGE_BYTES) * PAGE_BYTES)
