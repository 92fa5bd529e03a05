"""The memory that ranks of one host share: an anonymous file that exists as long as a process holds it, never by name.

No entry in /dev/shm, so nothing is left by a crash, its size limit does not apply, and two servers cannot meet by chance.
Each group has a segment of its own. Imports no torch: the parent of the ranks makes the segment before it knows the model.
"""

import mmap
import os

LINE_BYTES = 64  # a cache line
# Each rank's words have lines to themselves, or ranks would slow each other's polling: a line of its progress, which others
# poll, then what is rarely written or only read after a failure. ``comm.transport.shared_board`` says what is where.
RANK_BYTES = 8 * LINE_BYTES
CHUNK_BYTES = 4 << 20  # the largest piece of a message that travels at once


def why_unusable() -> str | None:
    """The reason why shared memory cannot be used here; None when it can."""
    if not hasattr(os, "memfd_create"):
        return "this system has no anonymous shared files (memfd_create)"
    try:
        os.close(os.memfd_create("tightwire-probe"))
    except OSError as error:  # a sandbox may refuse the call
        return f"an anonymous shared file cannot be made here (memfd_create: {error.strerror})"
    return None


def make_segment(world_size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """A file descriptor to hand to the ``world_size`` ranks of one group. Memory is used only as messages are written.

    Layout: ``RANK_BYTES`` of words per rank, padded to a page, then two chunks per rank.

    Raises:
        ValueError: ``chunk_bytes`` is not a multiple of a cache line.
    """
    if chunk_bytes <= 0 or chunk_bytes % LINE_BYTES:
        raise ValueError(f"chunk_bytes must be a positive multiple of {LINE_BYTES}, got {chunk_bytes}")
    fd = os.memfd_create("tightwire-ranks")
    os.ftruncate(fd, header_bytes(world_size) + 2 * world_size * chunk_bytes)
    return fd


def header_bytes(world_size: int) -> int:
    return -(-world_size * RANK_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
