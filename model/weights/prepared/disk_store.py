"""Reads one rank's streamed layers from its file of a prepared folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tightwire.comm.protocols import Moved
from tightwire.model.weights.layer_store import LocalStore
from tightwire.model.weights.packed_layer import PackedLayer
from tightwire.model.weights.prepared.blob_file import PIECE_BYTES, BlobFile, read_blob, read_span, reads_direct
from tightwire.model.weights.prepared.manifest import Blob

DISK_IO = ("auto", "direct", "buffered")


def choose_io(asked: str, paths: Sequence[Path], available_bytes: int) -> str:
    """Resolve ``auto``: ``direct`` when the files together are larger than half of the available memory.

    Passes read the files cyclically. A page cache that is too small evicts the least recently used pages, which are the
    next ones to be read, so it never has a hit and costs an extra copy.

    Args:
        paths: the files of all ranks on this host.
    Raises:
        ValueError: the file system does not support direct reads, or ``asked`` is unknown.
    """
    if asked not in DISK_IO:
        raise ValueError(f"reads from a disk are one of {', '.join(DISK_IO)}, got {asked!r}")
    if asked == "buffered":
        return asked
    possible = all(reads_direct(path) for path in paths)
    if asked == "direct" and not possible:
        raise ValueError(
            f"{paths[0].parent}: its file system cannot read around the page cache, so direct reads are not possible; use "
            "buffered ones, or put the folder on a local disk"
        )
    large = sum(path.stat().st_size for path in paths) > available_bytes // 2
    return "direct" if possible and (large or asked == "direct") else "buffered"


class DiskStore(LocalStore):
    """``LayerStore`` over one file. It learns the order of the layers in the first pass."""

    has_memory = False

    def __init__(
        self,
        path: Path,
        stored: Sequence[PackedLayer],
        blobs: Sequence[Blob],
        *,
        direct: bool,
        verify: bool = False,
        patience_s: float = 1.0,
    ) -> None:
        """
        Args:
            stored: the form of each layer in its blob.
            direct: read around the page cache.
            verify: compare each layer's checksum when it is first read.
            patience_s: time limit for retries of reads that fail temporarily; damage is not retried.
        Raises:
            WeightsError: the file cannot be opened in this mode.
        """
        self._stored, self._blobs = stored, blobs
        self._file = BlobFile(path, direct=direct, patience_s=patience_s)
        self._unverified = set(range(len(blobs)) if verify else ())
        self._next: dict[int, int] = {}
        self._last: int | None = None

    @property
    def name(self) -> str:
        return f"{self._file.path} ({'around' if self._file.direct else 'through'} the page cache)"

    def packed(self, layer: int) -> PackedLayer:
        return self._stored[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        digest = hashlib.sha256() if layer in self._unverified else None
        read_blob(self._file, self._blobs[layer], f"layer {layer}", into, moved, digest)
        self._unverified.discard(layer)
        self._expect_next(layer)
        return into

    def read_part(self, layer: int, start: int, into: Tensor, moved: Moved) -> None:
        """Fill ``into`` (N,) uint8 with the layer's bytes from ``start`` on. No checksum covers a part.

        Raises:
            WeightsError: the bytes cannot be read.
        """
        read_span(self._file, self._blobs[layer].offset + start, f"layer {layer}", into, moved)

    def close(self) -> None:
        self._file.close()

    def _expect_next(self, layer: int) -> None:
        """Start reading the next layer into the page cache before the caller asks for it."""
        if self._last is not None:
            self._next[self._last] = layer
        self._last = layer
        blob = self._blobs[self._next.get(layer, (layer + 1) % len(self._blobs))]
        self._file.expect(blob.offset, min(PIECE_BYTES, blob.num_bytes))
