"""Writes and reads a large file in order, in blobs of whole pages with checksums, through the page cache or around it.

Reads that fail temporarily (disk, file server, a file that is being replaced) are retried until a time limit.
"""

import errno
import hashlib
import logging
import mmap
import os
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

PAGE_BYTES = 4096
PIECE_BYTES = 8 << 20  # per read: large enough to keep a disk busy, small enough for a slow disk to report progress

_LOG = logging.getLogger(__name__)
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # first and longest pause between attempts; pauses double
_PATIENCE_S = 1.0
_TEMPORARY = (errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOMEM, errno.ESTALE)

Moved = Callable[[int], object]  # called with the number of bytes that were just read or written


class Blob(msgspec.Struct, frozen=True):
    """A blob's place in its file, in whole pages."""

    offset: int
    num_bytes: int
    sha256: str


class UnreadableFileError(Exception):
    """The file cannot be opened or read."""


class DamagedFileError(Exception):
    """The file is too short, or its bytes are not those that were written."""


class _TemporaryError(Exception):
    """A failed read that may succeed when retried. ``final``: the error to raise when retries end."""

    def __init__(self, what: str, final: type[Exception]) -> None:
        super().__init__(what)
        self.final = final


class LargeFile:
    """One file, open for reading. Not thread-safe."""

    def __init__(self, path: Path, *, direct: bool, patience_s: float = _PATIENCE_S) -> None:
        """Open the file; raises UnreadableFileError.

        ``direct``: read around the page cache; then addresses, offsets and sizes must be whole pages. ``patience_s``:
        time limit for retries of reads that fail temporarily.
        """
        self.path, self.direct, self._patience_s = path, direct, patience_s
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self._fd = os.open(path, self._flags)
        except OSError as error:
            raise UnreadableFileError(f"{path}: cannot be opened: {error.strerror}") from None

    def read(self, blob: Blob, what: str, into: memoryview, moved: Moved, *, check: bool) -> None:
        """Read one blob in pieces; with ``check``, also compare its checksum.

        ``into``: as long as the blob; or PIECE_BYTES, which each piece overwrites, to compare the checksum only.
        Raises errors about ``what``: UnreadableFileError; DamagedFileError, also if the file is too short.
        """
        digest = hashlib.sha256()
        for start in range(0, blob.num_bytes, PIECE_BYTES):
            at = start % len(into)
            piece = into[at : at + min(PIECE_BYTES, blob.num_bytes - start)]
            self._fill(piece, blob.offset + start, what)
            if check:
                digest.update(piece)
            moved(len(piece))
        if check and digest.hexdigest() != blob.sha256:
            raise DamagedFileError(
                f"{self.path}: {what} is damaged: its {blob.num_bytes} bytes from byte {blob.offset} on have sha256 "
                f"{digest.hexdigest()}, and {blob.sha256} was written"
            )

    def drop_from_cache(self) -> None:
        """Drop the file from the page cache, so that the next reads come from the disk."""
        os.fsync(self._fd)  # dirty pages would stay in the cache
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _fill(self, view: memoryview, offset: int, what: str) -> None:
        deadline_s, pause_s, attempt = time.monotonic() + self._patience_s, _PAUSE_S, 1
        while True:
            try:
                self._fill_once(view, offset, what)
                return
            except _TemporaryError as error:
                if time.monotonic() + pause_s > deadline_s:
                    raise error.final(f"{error} (tried {attempt} times)") from None
                _LOG.warning("%s; trying again in %.1f s (attempt %d)", error, pause_s, attempt + 1)
            time.sleep(pause_s)
            pause_s, attempt = min(2 * pause_s, _LONGEST_PAUSE_S), attempt + 1
            self._reopen()

    def _fill_once(self, view: memoryview, offset: int, what: str) -> None:
        got = 0
        while got < len(view):
            num_bytes = self._read_some(view[got:], offset + got, what)
            # Direct reads must start at a page boundary; only the end of the file may be inside a page.
            whole = num_bytes - num_bytes % PAGE_BYTES if self.direct and got + num_bytes < len(view) else num_bytes
            if not whole:
                raise _TemporaryError(
                    f"{self.path}: ends inside {what}: expected {len(view)} bytes at byte {offset}, got {got + num_bytes}",
                    DamagedFileError,
                )
            got += whole

    def _read_some(self, view: memoryview, offset: int, what: str) -> int:
        try:
            return os.preadv(self._fd, [view], offset)
        except OSError as error:
            failure = f"{self.path}: {what}, {len(view)} bytes at byte {offset}: cannot be read: {error.strerror}"
            if error.errno in _TEMPORARY:
                raise _TemporaryError(failure, UnreadableFileError) from None
            raise UnreadableFileError(failure) from None

    def _reopen(self) -> None:
        """Open the path again: a file server may have dropped the file, or a copy may have replaced it."""
        try:
            fd = os.open(self.path, self._flags)
        except OSError as error:
            _LOG.warning("%s: cannot be opened again: %s", self.path, error.strerror)
            return
        os.close(self._fd)
        self._fd = fd


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
    """Return ``direct`` if these files, all read by this host, are larger than half of the available memory.

    The files are read cyclically. A page cache that is too small evicts the least recently used pages, which are the
    next ones to be read, so it never has a hit and costs an extra copy. ``buffered`` also where reads cannot be direct.
    """
    large = sum(path.stat().st_size for path in paths) > available_bytes // 2
    return "direct" if large and all(map(reads_direct, paths)) else "buffered"


class LargeFileWriter:
    """Writes blobs to a new file and records the place and checksum of each. Its methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.blobs: list[Blob] = []
        self._offset = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, content: memoryview, moved: Moved) -> None:
        """Append a blob of whole pages; ``moved`` gets the bytes written."""
        digest = hashlib.sha256()
        for start in range(0, len(content), PIECE_BYTES):
            piece = content[start : start + PIECE_BYTES]
            digest.update(piece)
            written = 0
            while written < len(piece):
                written += os.pwrite(self._fd, piece[written:], self._offset + start + written)
            moved(len(piece))
        self.blobs.append(Blob(self._offset, len(content), digest.hexdigest()))
        self._offset += len(content)

    def sync(self) -> None:
        """Wait until all bytes are on the disk. Some file systems report a full disk only here."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def file_crc(path: Path) -> int:
    """The CRC-32 of a file. Cost: reads it once, about 1 GB/s. Raises OSError."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(PIECE_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc
