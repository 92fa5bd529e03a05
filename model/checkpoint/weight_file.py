"""Reads slices of a checkpoint's file, without a second copy of the weights.

Files are read, not mapped: weights are used once and in order, where a page fault per page costs several times a read.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tightwire.model.checkpoint.errors import ModelError

# Bytes per piece: large enough that Python's share of a copy vanishes, small next to any rank's weights.
CHUNK_BYTES = 8 << 20


class WeightFile:
    """Slices of a file's bytes. Threads may read at the same time."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        with path.open("rb") as file:
            self.size = path.stat().st_size
            # For the header, which is parsed in place.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
            self._fd = os.dup(file.fileno())
        self._scratch = threading.local()

    def rows(self, offset: int, num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """(rows, bytes), read into memory that this thread's next ``rows`` reuses.

        Raises:
            ModelError: the file ends too early, or cannot be read.
        """
        num_bytes = num_rows * row_bytes
        room = getattr(self._scratch, "bytes", None)
        if room is None or len(room) < num_bytes:
            room = self._scratch.bytes = np.empty(max(num_bytes, CHUNK_BYTES), np.uint8)
        self.read_into(room[:num_bytes], offset)
        return room[:num_bytes].reshape(num_rows, row_bytes)

    def read_into(self, out_B: npt.NDArray[np.uint8], offset: int) -> None:
        """Fill ``out_B``, contiguous, with the bytes from ``offset`` on.

        Raises:
            ModelError: the file ends too early, or cannot be read.
        """
        done = 0
        while done < len(out_B):
            try:
                got = os.preadv(self._fd, [out_B.data[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"{self.path}: cannot be read at {offset + done}: {error.strerror}") from None
            if got == 0:
                raise ModelError(
                    f"{self.path}: ends at {offset + done}, {len(out_B) - done} bytes early; was it truncated since it was opened?"
                )
            done += got

    def numbers(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``rows`` as a tensor of numbers."""
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        return torch.from_numpy(self.rows(offset, shape[0], row_bytes)).view(-1).view(dtype).view(shape)

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)


def row_chunks(rows: range, row_bytes: int, *, multiple_of: int = 1) -> Iterator[range]:
    """Cut ``rows`` into pieces of about ``CHUNK_BYTES``, each but the last a multiple of ``multiple_of`` rows."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes) // multiple_of) * multiple_of
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
