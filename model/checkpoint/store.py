"""The last step of reading a checkpoint: numbers as they come into the tensor or packed matrix that keeps them."""

from torch import Tensor

from tightwire.kernels.spec.packed import Matrix, PackedMatrix, quantize
from tightwire.model.checkpoint.errors import ModelError


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
    """Bytes that a byte of 16-bit numbers becomes on its way into ``out``: keeps the piece in hand in bounds."""
    return 16 if isinstance(out, PackedMatrix) else 1  # float32, and temporaries of quantizing
