"""A file of images, read in pieces by address: through the page cache or around it, never by page faults.

What may pass (a disk's errors, a file server's, a file that is being copied anew) is tried again for as long as the caller has
patience; what does not come is an error that says where and how much. Reads go where the caller wants them; only parts at odd
addresses, read around the page cache, go through a buffer that the file keeps.
"""

import errno
import hashlib
import logging
import mmap
import os
import time
from pathlib import Path

import torch
from torch import Tensor

from tightwire.comm.buffers import PAGE_BYTES, page_aligned
from tightwire.model.checkpoint.errors import WeightsError
from tightwire.model.weights.layer_store import Moved
from tightwire.model.weights.prepared.manifest import Blob

PIECE_BYTES = 8 << 20  # of one read: enough for a disk to work on at many places, and a sign of life when it is slow

_LOG = logging.getLogger(__name__)
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # before the second attempt, and before any; each twice as long as the one before
_PATIENCE_S = 1.0
_PASSING = (errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOMEM, errno.ESTALE)


class _PassingError(Exception):
    """It may go better the next time; says what went wrong, and what to do when it does not."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class BlobFile:
    """One open file. Safe to use from one thread at a time."""

    def __init__(self, path: Path, *, direct: bool, patience_s: float = _PATIENCE_S) -> None:
        """
        Args:
            direct: around the page cache; then addresses, offsets and sizes must be whole pages.
            patience_s: for how long a read that may go better is tried again.
        Raises:
            WeightsError: it cannot be opened so.
        """
        self.path, self.direct, self._patience_s = path, direct, patience_s
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._scratch: memoryview | None = None
        try:
            self._fd = os.open(path, self._flags)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from None

    def fill(self, view: memoryview, offset: int, what: str) -> None:
        """Read ``view``'s bytes from ``offset`` on.

        Args:
            view: at most PIECE_BYTES; larger ones are read as well, without a sign of life between.
            what: for errors, such as ``layer 3``.
        Raises:
            WeightsError: the file ends before, or fails, and does so for longer than there is patience.
        """
        deadline_s, pause_s, attempt = time.monotonic() + self._patience_s, _PAUSE_S, 1
        while True:
            try:
                self._fill_once(view, offset, what)
                return
            except _PassingError as error:
                if time.monotonic() + pause_s > deadline_s:
                    raise WeightsError(f"{error} (tried {attempt} times); {error.advice}") from None
                _LOG.warning("%s; trying again in %.1f s (attempt %d)", error, pause_s, attempt + 1)
            time.sleep(pause_s)
            pause_s, attempt = min(2 * pause_s, _LONGEST_PAUSE_S), attempt + 1
            self._reopen()

    def scratch(self) -> memoryview:
        """PIECE_BYTES and a page at either end, of whole pages: for the next read, and written over by the one after it."""
        if self._scratch is None:
            self._scratch = page_aligned(PIECE_BYTES + 2 * PAGE_BYTES, torch.device("cpu")).numpy().data
        return self._scratch

    def expect(self, offset: int, num_bytes: int) -> None:
        """Have the kernel read this part into its cache, beside whatever else goes on; nothing when reads are direct."""
        if not self.direct:
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def forget(self) -> None:
        """Drop the file from the page cache, so that what is read next comes from the disk."""
        os.fsync(self._fd)  # what is not on the disk yet would stay
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _fill_once(self, view: memoryview, offset: int, what: str) -> None:
        got = 0
        while got < len(view):
            num_bytes = self._read(view[got:], offset + got, what)
            # Around the page cache the next read must begin with a page too; only a file's end is none.
            whole = num_bytes - num_bytes % PAGE_BYTES if self.direct and got + num_bytes < len(view) else num_bytes
            if not whole:
                raise _PassingError(
                    f"{self.path}: ends inside {what}: at byte {offset} {len(view)} bytes were wanted, and {got + num_bytes} came",
                    "copy the folder again, or make it anew with `tightwire prepare`",
                )
            got += whole

    def _read(self, view: memoryview, offset: int, what: str) -> int:
        try:
            return os.preadv(self._fd, [view], offset)
        except OSError as error:
            failure = f"{self.path}: {what}, {len(view)} bytes at byte {offset}: cannot be read: {error.strerror}"
            advice = "look at the disk with `tightwire prepare --check` and at the kernel's log"
            if error.errno in _PASSING:
                raise _PassingError(failure, advice) from None
            raise WeightsError(f"{failure}; {advice}") from None

    def _reopen(self) -> None:
        """The file that has the name now, if any: a file server's may have been forgotten, a copy replaced by another."""
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


def read_span(file: BlobFile, offset: int, what: str, into: Tensor, moved: Moved) -> None:
    """Read part of an image, at any address: around the page cache through a buffer of whole pages.

    Args:
        into: (N,) uint8 on the host.
    Raises:
        WeightsError: it does not come.
    """
    view = into.numpy().data
    scratch = file.scratch() if file.direct else None
    for start in range(0, len(view), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        first, end = offset + start, offset + start + len(piece)
        if scratch is None:
            file.fill(piece, first, what)
        else:
            first_page, end_page = first // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
            file.fill(scratch[: end_page - first_page], first_page, what)
            piece[:] = scratch[first - first_page : end - first_page]
        moved(len(piece))


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
