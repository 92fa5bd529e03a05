"""Reads parts of a checkpoint's named tensors: the protocol of all formats, and the last step that they share."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from tightwire.kernels.spec.packed import Matrix, PackedMatrix, quantize
from tightwire.model.checkpoint.errors import ModelError


class CheckpointReader(Protocol):
    """Reads parts of named tensors of one checkpoint; names are Hugging Face's (``model.layers.0.mlp.up_proj.weight``).

    Only the requested rows and columns are read into memory, so a rank's peak stays near its share.
    """

    def names(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_as(self, name: str) -> str:
        """The type of its numbers by GGUF's name, such as F32 or Q4_1; ``random`` for random weights."""
        ...

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        """Copy ``tensor[rows][:, columns]`` (or ``vector[rows]``) into ``out``, converting to its dtype.

        Blocks that already have the format of a packed ``out`` are copied unchanged (columns are whole groups); any other
        numbers are quantized.

        Raises:
            ModelError: numbers that cannot be quantized.
        """
        ...


def store_rows(out: Matrix, start: int, piece: Tensor, name: str) -> None:
    """``piece`` as the rows of ``out`` from ``start`` on: converted to its dtype, or quantized.

    Raises:
        ModelError: numbers that cannot be quantized.
    """
    if isinstance(out, Tensor):
        out[start : start + len(piece)].copy_(piece)
        return
    try:
        quantized = quantize(piece, out.format)
    except ValueError as error:
        raise ModelError(f"tensor {name} cannot be quantized: {error}") from None
    out.rows(start, start + len(piece)).blocks_OB.copy_(quantized.blocks_OB)


def growth_of(out: Matrix) -> int:
    """Memory that a byte of 16-bit numbers takes on its way into ``out``, as a factor; readers limit their pieces by it."""
    return 16 if isinstance(out, PackedMatrix) else 1  # float32, and temporaries of quantizing
