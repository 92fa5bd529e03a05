"""Memory that ranks of one host share: an anonymous file, made by their parent without torch (docs/comm.md)."""

import mmap
import os

from tightwire.kernels.cpu.library import available

LINE_BYTES = 64  # a cache line
# Each rank's words have their own cache lines, because sharing lines would slow polling: first the turn, which others poll,
# then words that are rarely written or read only after a failure. ``comm.transport.shared_board`` has the layout.
RANK_BYTES = 8 * LINE_BYTES
CHUNK_BYTES = 4 << 20  # the largest part of a message in one turn


def why_unusable() -> str | None:
    """The reason why ranks cannot share memory here; None: they can."""
    if not available():
        return "its sums need the compiled CPU kernels, and torch's reference is in use (kernels: spec)"
    if not hasattr(os, "memfd_create"):
        return "this system has no anonymous shared files (memfd_create)"
    try:
        os.close(os.memfd_create("tightwire-probe"))
    except OSError as error:  # a sandbox may refuse the call
        return f"an anonymous shared file cannot be made here (memfd_create: {error.strerror})"
    return None


def make_segment(world_size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return a file descriptor for the ``world_size`` ranks of one group. Pages are allocated when first written.

    Layout: ``RANK_BYTES`` of words per rank, padded to a page, then two chunks per rank, of whole cache lines.
    """
    if chunk_bytes <= 0 or chunk_bytes % LINE_BYTES:
        raise ValueError(f"chunk_bytes must be a positive multiple of {LINE_BYTES}, got {chunk_bytes}")
    fd = os.memfd_create("tightwire-ranks")
    os.ftruncate(fd, header_bytes(world_size) + 2 * world_size * chunk_bytes)
    return fd


def header_bytes(world_size: int) -> int:
    return -(-world_size * RANK_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
