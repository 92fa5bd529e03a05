"""One rank's layers out of its file of a prepared folder, pass after pass."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from tightwire.model.weights.image import Image
from tightwire.model.weights.layer_store import LocalStore, Moved
from tightwire.model.weights.prepared.blob_file import PIECE_BYTES, BlobFile, read_blob, read_span, reads_direct
from tightwire.model.weights.prepared.manifest import Blob

DISK_IO = ("auto", "direct", "buffered")


def choose_io(asked: str, paths: Sequence[Path], available_bytes: int) -> str:
    """Settle ``auto``: ``direct`` where the files together are larger than half of the memory that can still be taken.

    Passes read all of it in a circle. Of a page cache that is too small, least recently used goes first, which is what comes
    next: nothing is ever found there, and a copy is paid for nothing.

    Args:
        paths: of all ranks on this host.
    Raises:
        ValueError: ``direct`` cannot be had, or there is no such kind.
    """
    if asked not in DISK_IO:
        raise ValueError(f"reads from a disk are one of {', '.join(DISK_IO)}, got {asked!r}")
    if asked == "buffered":
        return asked
    possible = all(reads_direct(path) for path in paths)
    if asked == "direct" and not possible:
        raise ValueError(
            f"{paths[0].parent}: its file system reads nothing around the page cache, so direct reads cannot be had; use "
            "buffered ones, or put the folder on a local disk"
        )
    large = sum(path.stat().st_size for path in paths) > available_bytes // 2
    return "direct" if possible and (large or asked == "direct") else "buffered"


class DiskStore(LocalStore):
    """``LayerStore`` over one file. The order of the layers is learned in the first pass."""

    has_memory = False

    def __init__(
        self,
        path: Path,
        images: Sequence[Image],
        blobs: Sequence[Blob],
        *,
        direct: bool,
        verify: bool = False,
        patience_s: float = 1.0,
    ) -> None:
        """
        Args:
            images: how each layer lies in its blob.
            direct: read around the page cache.
            verify: compare each layer's checksum the first time that it is read.
            patience_s: for how long a read that may go better is tried again; damage never is.
        Raises:
            WeightsError: the file cannot be opened so.
        """
        self._images, self._blobs = images, blobs
        self._file = BlobFile(path, direct=direct, patience_s=patience_s)
        self._unverified = set(range(len(blobs)) if verify else ())
        self._next: dict[int, int] = {}
        self._last: int | None = None

    @property
    def name(self) -> str:
        return f"{self._file.path} ({'around' if self._file.direct else 'through'} the page cache)"

    def image(self, layer: int) -> Image:
        return self._images[layer]

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        digest = hashlib.sha256() if layer in self._unverified else None
        read_blob(self._file, self._blobs[layer], f"layer {layer}", into, moved, digest)
        self._unverified.discard(layer)
        self._expect_next(layer)
        return into

    def read_part(self, layer: int, start: int, into: Tensor, moved: Moved) -> None:
        """The bytes of the layer's image from ``start`` on, as many as ``into`` (N,) uint8 has; no checksum tells of them.

        Raises:
            WeightsError: they cannot be had.
        """
        read_span(self._file, self._blobs[layer].offset + start, f"layer {layer}", into, moved)

    def close(self) -> None:
        self._file.close()

    def _expect_next(self, layer: int) -> None:
        """Have the next layer's beginning on its way while the caller may be waiting for a buffer."""
        if self._last is not None:
            self._next[self._last] = layer
        self._last = layer
        blob = self._blobs[self._next.get(layer, (layer + 1) % len(self._blobs))]
        self._file.expect(blob.offset, min(PIECE_BYTES, blob.num_bytes))
