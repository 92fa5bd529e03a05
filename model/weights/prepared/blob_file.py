"""The files of a prepared folder: the manifest, and files of packed layers (blobs), written in order and read in pieces.

The manifest has the model, its split and formats, and the place and checksum of each blob. It is written last, so a folder
with a manifest is complete. It has its own checksum, so a changed manifest is rejected.

Reads that fail temporarily (disk, file server, a file that is being replaced) are retried until a time limit.
"""

import errno
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from torch import Tensor

from tightwire.comm.protocols import Moved
from tightwire.model.buffers import PAGE_BYTES
from tightwire.model.checkpoint.errors import ModelError, WeightsError
from tightwire.model.layout import Shard

MANIFEST = "tightwire.json"
SCHEMA = "tightwire.prepared/1"

MAKE_AGAIN = "copy the folder again, or make it again with `tightwire prepare`"
_CUTS = ("query_heads", "kv_heads", "mlp_columns", "vocab_rows")


class Blob(msgspec.Struct, frozen=True):
    """A packed layer's place in its file, in whole pages."""

    offset: int
    num_bytes: int
    sha256: str


class RankFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file: the outer tensors, then the layers in order, without gaps."""

    shard: dict[str, tuple[int, int]]  # start and stop of each of the shard's ranges
    outer: Blob
    layers: tuple[Blob, ...]

    @property
    def blobs(self) -> tuple[Blob, ...]:
        return self.outer, *self.layers

    @property
    def num_bytes(self) -> int:
        return sum(blob.num_bytes for blob in self.blobs)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str  # name of the original model
    dtype: Literal["float32", "bfloat16", "float16"]  # of plain numbers
    shares: tuple[float, ...] | None  # see --tp-split
    codec: str  # of the layers' plain matrices
    packed: dict[str, str]  # WeightFormats: format by matrix
    plain: dict[str, str]  # type in the checkpoint, by matrix
    ranks: tuple[RankFile, ...]
    files: dict[str, str]  # sha256 of the other files, by name

    @property
    def tp(self) -> int:
        return len(self.ranks)

    @property
    def num_bytes(self) -> int:
        """Total size of all ranks' files."""
        return sum(rank.num_bytes for rank in self.ranks)

    def rank_path(self, folder: Path, rank: int) -> Path:
        return folder / rank_file_name(rank, self.tp)


class _Envelope(msgspec.Struct, frozen=True):
    schema: str
    sha256: str  # of the bytes of the next field
    prepared: msgspec.Raw


def rank_file_name(rank: int, tp: int) -> str:
    return f"rank-{rank}-of-{tp}.weights"


def cuts_of(shard: Shard) -> dict[str, tuple[int, int]]:
    """Return a shard in the manifest's form."""
    ranges: dict[str, range] = {name: getattr(shard, name) for name in _CUTS}
    return {name: (own.start, own.stop) for name, own in ranges.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    envelope = _Envelope(SCHEMA, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    (folder / MANIFEST).write_bytes(msgspec.json.encode(envelope) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest; raises ModelError if it cannot be read, is damaged, or has another version."""
    path = folder / MANIFEST
    try:
        envelope = msgspec.json.decode(path.read_bytes(), type=_Envelope)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path}: is damaged or not the manifest of a prepared folder: {error}; {MAKE_AGAIN}"
        ) from None
    if envelope.schema != SCHEMA:
        raise ModelError(
            f"{path}: has schema {envelope.schema!r}, and this version of Tightwire reads {SCHEMA!r}; make the folder again "
            "with this version's `tightwire prepare`, or serve it with the version that made it"
        )
    body = bytes(envelope.prepared)
    if hashlib.sha256(body).hexdigest() != envelope.sha256:
        raise ModelError(f"{path}: is damaged: its checksum differs; {MAKE_AGAIN}")
    try:
        return msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise ModelError(
            f"{path}: does not have the fields that this version of Tightwire reads: {error}; {MAKE_AGAIN}"
        ) from None


PIECE_BYTES = 8 << 20  # per read: large enough to keep a disk busy, small enough for a slow disk to report progress

_LOG = logging.getLogger(__name__)
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # first and longest pause between attempts; pauses double
_PATIENCE_S = 1.0
_TEMPORARY = (errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOMEM, errno.ESTALE)


class _TemporaryError(Exception):
    """A failed read that may succeed when retried. ``advice`` is for the message when retries end."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class BlobFile:
    """One open file. Not thread-safe."""

    def __init__(self, path: Path, *, direct: bool, patience_s: float = _PATIENCE_S) -> None:
        """Open the file; raises WeightsError.

        ``direct``: read around the page cache; then addresses, offsets and sizes must be whole pages. ``patience_s``:
        time limit for retries of reads that fail temporarily.
        """
        self.path, self.direct, self._patience_s = path, direct, patience_s
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self._fd = os.open(path, self._flags)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from None

    def fill(self, view: memoryview, offset: int, what: str) -> None:
        """Read ``view`` from ``offset`` on; WeightsError about ``what``: too short or unreadable for ``patience_s``."""
        deadline_s, pause_s, attempt = time.monotonic() + self._patience_s, _PAUSE_S, 1
        while True:
            try:
                self._fill_once(view, offset, what)
                return
            except _TemporaryError as error:
                if time.monotonic() + pause_s > deadline_s:
                    raise WeightsError(f"{error} (tried {attempt} times); {error.advice}") from None
                _LOG.warning("%s; trying again in %.1f s (attempt %d)", error, pause_s, attempt + 1)
            time.sleep(pause_s)
            pause_s, attempt = min(2 * pause_s, _LONGEST_PAUSE_S), attempt + 1
            self._reopen()

    def drop_from_cache(self) -> None:
        """Drop the file from the page cache, so that the next reads come from the disk."""
        os.fsync(self._fd)  # dirty pages would stay in the cache
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _fill_once(self, view: memoryview, offset: int, what: str) -> None:
        got = 0
        while got < len(view):
            num_bytes = self._read(view[got:], offset + got, what)
            # Direct reads must start at a page boundary; only the end of the file may be inside a page.
            whole = num_bytes - num_bytes % PAGE_BYTES if self.direct and got + num_bytes < len(view) else num_bytes
            if not whole:
                raise _TemporaryError(
                    f"{self.path}: ends inside {what}: expected {len(view)} bytes at byte {offset}, got {got + num_bytes}",
                    MAKE_AGAIN,
                )
            got += whole

    def _read(self, view: memoryview, offset: int, what: str) -> int:
        try:
            return os.preadv(self._fd, [view], offset)
        except OSError as error:
            failure = f"{self.path}: {what}, {len(view)} bytes at byte {offset}: cannot be read: {error.strerror}"
            advice = "check the folder with `tightwire prepare --check`, and the kernel's log"
            if error.errno in _TEMPORARY:
                raise _TemporaryError(failure, advice) from None
            raise WeightsError(f"{failure}; {advice}") from None

    def _reopen(self) -> None:
        """Open the path again: a file server may have dropped the file, or a copy may have replaced it."""
        try:
            fd = os.open(self.path, self._flags)
        except OSError as error:
            _LOG.warning("%s: cannot be opened again: %s", self.path, error.strerror)
            return
        os.close(self._fd)
        self._fd = fd


def read_blob(
    file: BlobFile, blob: Blob, what: str, into: Tensor, moved: Moved, digest: "hashlib._Hash | None" = None
) -> None:
    """Read one blob in pieces; with a new ``digest``, also compare its checksum.

    ``into``: (blob bytes,) uint8 on the host; or PIECE_BYTES, which each piece overwrites, to compare the checksum
    only. Raises WeightsError: the blob cannot be read, or is damaged.
    """
    view = into.numpy().data
    for start in range(0, blob.num_bytes, PIECE_BYTES):
        at = start % len(view)
        piece = view[at : at + min(PIECE_BYTES, blob.num_bytes - start)]
        file.fill(piece, blob.offset + start, what)
        if digest is not None:
            digest.update(piece)
        moved(len(piece))
    if digest is not None and digest.hexdigest() != blob.sha256:
        raise WeightsError(
            f"{file.path}: {what} is damaged: its {blob.num_bytes} bytes from byte {blob.offset} on have sha256 "
            f"{digest.hexdigest()}, and {blob.sha256} was written; {MAKE_AGAIN}"
        )


def reads_direct(path: Path) -> bool:
    """Return True if the file system of ``path``, a file of at least a page, supports direct reads."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.preadv(fd, [page], 0) == PAGE_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)


def choose_io(paths: Sequence[Path], available_bytes: int) -> str:
    """Return ``direct`` if these files of all ranks on this host are larger than half of the available memory.

    Passes read the files cyclically. A page cache that is too small evicts the least recently used pages, which are the
    next ones to be read, so it never has a hit and costs an extra copy. ``buffered`` also where reads cannot be direct.
    """
    large = sum(path.stat().st_size for path in paths) > available_bytes // 2
    return "direct" if large and all(map(reads_direct, paths)) else "buffered"


class BlobWriter:
    """Writes packed layers to a new file and records the place and checksum of each. Its methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.blobs: list[Blob] = []
        self._offset = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, packed_bytes: Tensor, moved: Moved) -> None:
        """Append (bytes,) uint8 on the host, whole pages; ``moved`` gets the bytes written."""
        view, digest = packed_bytes.numpy().data, hashlib.sha256()
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
        """Wait until all bytes are on the disk. Some file systems report a full disk only here."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
