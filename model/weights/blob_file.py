"""A file of images, read in pieces by address: through the page cache or around it, never by page faults.

A disk's passing errors are tried again; what does not come is an error that says where and how much. No read allocates.
"""

import errno
import hashlib
import logging
import mmap
import os
import time
from pathlib import Path

from torch import Tensor

from tightwire.comm.buffers import PAGE_BYTES
from tightwire.model.errors import WeightsError
from tightwire.model.weights.layer_store import Moved
from tightwire.model.weights.manifest import Blob

PIECE_BYTES = 8 << 20  # of one read: enough for a disk to work on at many places, and a sign of life when it is slow

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 4
_PAUSE_S = 0.1  # before the second attempt; twice as long before each further one
_PASSING = (errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOMEM)


class BlobFile:
    """One open file. Safe to use from one thread at a time."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        """``direct``: around the page cache; then addresses, offsets and sizes must be whole pages.

        Raises:
            WeightsError: it cannot be opened so.
        """
        self.path, self.direct = path, direct
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        except OSError as error:
            raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from None

    def fill(self, view: memoryview, offset: int, what: str) -> None:
        """Read ``view``'s bytes from ``offset`` on.

        Args:
            view: at most PIECE_BYTES; larger ones are read as well, without a sign of life between.
            what: for errors, such as ``layer 3``.
        Raises:
            WeightsError: the file ends before, or the disk fails again and again.
        """
        got = 0
        while got < len(view):
            num_bytes = self._read(view[got:], offset + got, what)
            # Around the page cache the next read must begin with a page too; only a file's end is none.
            whole = num_bytes - num_bytes % PAGE_BYTES if self.direct and got + num_bytes < len(view) else num_bytes
            if not whole:
                raise WeightsError(
                    f"{self.path}: ends inside {what}: at byte {offset} {len(view)} bytes were wanted, and {got + num_bytes} "
                    "came; copy the folder again, or make it anew with `tightwire prepare`"
                )
            got += whole

    def expect(self, offset: int, num_bytes: int) -> None:
        """Have the kernel read this part into its cache, beside whatever else goes on; nothing when reads are direct."""
        if not self.direct:
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self) -> None:
        """Drop the file from the page cache, so that what is read next comes from the disk."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _read(self, view: memoryview, offset: int, what: str) -> int:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return os.preadv(self._fd, [view], offset)
            except OSError as error:
                where = f"{self.path}: {what}, {len(view)} bytes at byte {offset}"
                if attempt == _ATTEMPTS or error.errno not in _PASSING:
                    raise WeightsError(
                        f"{where}: cannot be read: {error.strerror} (tried {attempt} times); look at the disk with "
                        "`tightwire prepare --check` and at the kernel's log"
                    ) from None
                _LOG.warning("%s: %s; trying again (%d of %d)", where, error.strerror, attempt + 1, _ATTEMPTS)
                time.sleep(_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")


def read_blob(
    file: BlobFile, blob: Blob, what: str, into: Tensor, moved: Moved, digest: "hashlib._Hash | None" = None
) -> None:
    """Read one image, piece by piece; with a fresh ``digest``, compare its checksum as well.

    Args:
        into: (blob bytes,) uint8 on the host; or PIECE_BYTES, written over and over, where only the checksum is wanted.
    Raises:
        WeightsError: it does not come, or is not what was written.
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
            f"{digest.hexdigest()}, and {blob.sha256} was written; copy the folder again, or make it anew with "
            "`tightwire prepare`"
        )


def reads_direct(path: Path) -> bool:
    """Whether the file system of ``path``, a file of at least a page, allows reads around its page cache."""
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
