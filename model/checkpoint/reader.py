"""The ``CheckpointReader`` protocol, and functions that the readers of all formats share.

Files are read, not mapped: weights are read once and in order, and a page fault per page costs several times a read.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tightwire.kernels.spec.packed import Matrix, PackedMatrix, quantize
from tightwire.model.checkpoint.errors import ModelError

# Bytes per piece: large enough to make Python's overhead negligible, small compared with any rank's weights.
CHUNK_BYTES = 8 << 20


class CheckpointReader(Protocol):
    """Reads parts of one checkpoint's tensors by Hugging Face name, such as ``model.layers.0.mlp.up_proj.weight``.

    Only the requested rows and columns are read, so a rank's peak memory stays close to its share.
    """

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_as(self, name: str) -> str:
        """GGUF's name of the tensor's type, such as F32 or Q4_1; ``random`` for random weights."""
        ...

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        """Copy ``tensor[rows][:, columns]`` (or ``vector[rows]``) into ``out``, converted to its dtype.

        With a packed ``out``, columns are whole groups: blocks already in its format are copied unchanged, other
        numbers are quantized; ModelError if they cannot be.
        """


def store_rows(out: Matrix, start: int, piece: Tensor, name: str) -> None:
    """Store ``piece`` as the rows of ``out`` from ``start`` on, converted to its dtype or quantized (else ModelError)."""
    if isinstance(out, Tensor):
        out[start : start + len(piece)].copy_(piece)
        return
    try:
        quantized = quantize(piece.to(out.blocks_OB.device), out.format)
    except ValueError as error:
        raise ModelError(f"tensor {name} cannot be quantized: {error}") from None
    out.rows(start, start + len(piece)).blocks_OB.copy_(quantized.blocks_OB)


def growth_of(out: Matrix) -> int:
    """Return the temporary memory per byte of 16-bit numbers stored in ``out``; it limits the size of pieces."""
    return 16 if isinstance(out, PackedMatrix) else 1  # a float32 copy, and temporaries of the quantization


class WeightFile:
    """Reads slices of a file's bytes. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the file. ModelError: it cannot be opened, or is the small file that git-lfs leaves in place of a large one."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = path.stat().st_size
                # Only the header is read through the map.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
                self._fd = os.dup(file.fileno())
        except OSError as error:
            raise ModelError(f"{path}: cannot be opened: {error.strerror or error}") from None
        if bytes(self.data[:7]) == b"version":
            raise ModelError(f"{path}: is a git-lfs pointer, not the weights; fetch them with 'git lfs pull'")
        self._scratch = threading.local()

    def rows(self, offset: int, num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """``read_into`` (rows, bytes), in memory that this thread's next call of ``rows`` overwrites."""
        num_bytes = num_rows * row_bytes
        room = getattr(self._scratch, "bytes", None)
        if room is None or len(room) < num_bytes:
            room = self._scratch.bytes = np.empty(max(num_bytes, CHUNK_BYTES), np.uint8)
        self.read_into(room[:num_bytes], offset)
        return room[:num_bytes].reshape(num_rows, row_bytes)

    def read_into(self, out_B: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill ``out_B`` with the bytes from ``offset`` on; raises ModelError if the file is too short or unreadable."""
        done = 0
        while done < len(out_B):
            try:
                got = os.preadv(self._fd, [out_B.data[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"{self.path}: cannot be read at {offset + done}: {error.strerror}") from None
            if got == 0:
                raise ModelError(
                    f"{self.path}: ends at {offset + done}, {len(out_B) - done} bytes early; it may have been truncated after it was opened"
                )
            done += got

    def numbers(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read a tensor with ``rows``."""
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        return torch.from_numpy(self.rows(offset, shape[0], row_bytes)).view(-1).view(dtype).view(shape)

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)


def check_finite(numbers: Tensor, path: Path, name: str) -> None:
    """Raise ModelError if a vector, or scales of blocks, are infinite or no numbers: every answer would be garbage."""
    if not bool(numbers.isfinite().all()):
        raise ModelError(
            f"{path}: tensor {name} has scales or vectors that are infinite or no numbers; the file is damaged, or was made from damaged "
            "weights: download it again"
        )


def row_chunks(rows: range, row_bytes: int, *, multiple_of: int = 1) -> Iterator[range]:
    """Yield pieces of ``rows`` of about ``CHUNK_BYTES``; all but the last have a multiple of ``multiple_of`` rows."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes) // multiple_of) * multiple_of
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
