"""A file mapped into memory and read slice by slice, so that no second copy of the weights ever exists."""

import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Bytes handled at a time: large enough that Python's share of a copy vanishes, small beside any rank's weights.
CHUNK_BYTES = 8 << 20


class MappedFile:
    """Views into a file's pages. Pages are the page cache's; ``release`` gives them back to it after use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size = path.stat().st_size
            # A private mapping: torch warns about buffers it could not write to, and nobody writes to these.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else b""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The numbers at ``offset``, without reading them yet."""
        return torch.frombuffer(self.data, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def bytes_2d(self, offset: int, rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """The same as raw bytes, for quantized blocks."""
        return np.frombuffer(self.data, np.uint8, rows * row_bytes, offset).reshape(rows, row_bytes)

    def release(self, offset: int, num_bytes: int) -> None:
        """Unmap these pages from this process; the kernel keeps them cached, and a later read finds them there."""
        if isinstance(self.data, mmap.mmap) and num_bytes:
            start = offset - offset % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, offset + num_bytes - start)


def row_chunks(rows: range, row_bytes: int, *, multiple_of: int = 1) -> Iterator[range]:
    """Cut ``rows`` into pieces of about ``CHUNK_BYTES``, each but the last a multiple of ``multiple_of`` rows."""
    step = max(1, CHUNK_BYTES // max(1, row_bytes) // multiple_of) * multiple_of
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
