"""Writes a file of images one after the other, and remembers where each lies and what its checksum is."""

import hashlib
import os
from pathlib import Path

from torch import Tensor

from tightwire.model.weights.layer_store import Moved
from tightwire.model.weights.prepared.blob_file import PIECE_BYTES
from tightwire.model.weights.prepared.manifest import Blob


class BlobWriter:
    """A new file; OSError of every kind is the caller's to explain."""

    def __init__(self, path: Path) -> None:
        self.blobs: list[Blob] = []
        self._offset = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, image_bytes: Tensor, moved: Moved) -> None:
        """Add (bytes,) uint8 on the host, whole pages; ``moved`` is told what has been written."""
        view, digest = image_bytes.numpy().data, hashlib.sha256()
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            digest.update(piece)
            written = 0
            while written < len(piece):
                written += os.pwrite(self._fd, piece[written:], self._offset + start + written)
            moved(len(piece))
        self.blobs.append(Blob(self._offset, len(view), digest.hexdigest()))
        self._offset += len(view)

    def sync(self) -> None:
        """Wait until all of it is on the disk: some file systems say only here that it is full."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
