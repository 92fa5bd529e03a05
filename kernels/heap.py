"""Memory that is freed and wanted again a moment later, as every layer's activations are, should not be fetched anew.

glibc gives large freed blocks back to the kernel, which clears and maps the pages again when they are next touched: some
2 us for each 4 KiB on a virtual machine, several times what copying them takes.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_BLOCK = 32 << 20  # the most that glibc takes for this option
_MOST_KEPT = 256 << 20


def keep_freed_memory() -> None:
    """From now on this process keeps up to 256 MiB that it has freed, and blocks below 32 MiB come out of that.

    Does nothing where the C library is another than glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
