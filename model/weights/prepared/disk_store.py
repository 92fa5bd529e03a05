"""Reads one rank's layers from its file of a prepared folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tightwire.comm.buffers import page_aligned
from tightwire.comm.protocols import Moved
from tightwire.model.weights.layer_store import LocalStore
from tightwire.model.weights.packed_layer import PackedLayer, PackedModel
from tightwire.model.weights.prepared.blob_file import PIECE_BYTES, BlobFile, read_blob, read_span, reads_direct
from tightwire.model.weights.prepared.manifest import RankFile

DISK_IO = ("auto", "direct", "buffered")
OUTER_NAME = "embedding, norm and head"
_CPU = torch.device("cpu")


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
    """``LayerFiles`` over one file. It learns the order of the layers in the first pass."""

    has_memory = False

    def __init__(
        self,
        path: Path,
        model: PackedModel,
        blobs: RankFile,
        *,
        direct: bool,
        verify: bool = False,
        patience_s: float = 1.0,
    ) -> None:
        """
        Args:
            model: the forms of the tensors in the file.
            direct: read around the page cache.
            verify: compare each checksum when a layer or the outer tensors are first read.
            patience_s: time limit for retries of reads that fail temporarily; damage is not retried.
        Raises:
            WeightsError: the file cannot be opened in this mode.
        """
        self.model = model
        self._outer, self._blobs, self._verify = blobs.outer, blobs.layers, verify
        self._file = BlobFile(path, direct=direct, patience_s=patience_s)
        self._unverified = set(range(len(self._blobs)) if verify else ())
        self._next: dict[int, int] = {}
        self._last: int | None = None

    @property
    def name(self) -> str:
        return f"{self._file.path} ({'around' if self._file.direct else 'through'} the page cache)"

    def packed(self, layer: int) -> PackedLayer:
        return self.model.stored[layer]

    def read_outer(self, device: torch.device, moved: Moved) -> Tensor:
        buffer = page_aligned(self._outer.num_bytes, _CPU)
        read_blob(self._file, self._outer, OUTER_NAME, buffer, moved, hashlib.sha256() if self._verify else None)
        return buffer.to(device)

    def read_plain(self, layer: int, device: torch.device, moved: Moved) -> Tensor:
        plain, stored = self.model.plain[layer], self.model.stored[layer]
        source = self.read(layer, page_aligned(stored.num_bytes, _CPU), moved).to(device)
        if stored.is_plain:
            return source
        decoded = page_aligned(plain.num_bytes, device)
        stored.decode(source, plain, decoded)
        return decoded

    def read(self, layer: int, into: Tensor, moved: Moved) -> Tensor:
        digest = hashlib.sha256() if layer in self._unverified else None
        read_blob(self._file, self._blobs[layer], f"layer {layer}", into, moved, digest)
        self._unverified.discard(layer)
        self._expect_next(layer)
        return into

    def read_parts(self, layer: int, parts: Sequence[tuple[int, Tensor]], moved: Moved) -> None:
        """Read only the parts; with ``verify`` the whole layer, because its checksum covers all of it."""
        if self._verify:
            whole = self.read(layer, page_aligned(self._blobs[layer].num_bytes, _CPU), moved)
            for start, part in parts:
                part.copy_(whole[start : start + len(part)])
            return
        for start, part in parts:
            host = part if part.device.type == "cpu" else torch.empty(part.shape, dtype=torch.uint8)
            read_span(self._file, self._blobs[layer].offset + start, f"layer {layer}", host, moved)
            part.copy_(host)

    def close(self) -> None:
        self._file.close()

    def _expect_next(self, layer: int) -> None:
        """Start reading the next layer into the page cache before the caller asks for it."""
        if self._last is not None:
            self._next[self._last] = layer
        self._last = layer
        blob = self._blobs[self._next.get(layer, (layer + 1) % len(self._blobs))]
        self._file.expect(blob.offset, min(PIECE_BYTES, blob.num_bytes))
