"""Settings of the C library's allocator: whether freed memory is kept or returned to the system."""

import ctypes

# Numbers of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_ON_HEAP_BYTES = 32 << 20  # more than this is refused by older versions
_KEPT_BYTES = 256 << 20
_SMALLEST_RETURNED_BYTES = 64 << 10


def keep_freed_memory() -> bool:
    """Let this process keep up to 256 MiB of what it frees for its next tensors; without glibc it returns False.

    A fresh 16 MiB tensor takes 4096 page faults: 0 to 14 of the 74 ms of a two-shot AllReduce over 2.5 Gbit/s.
    """
    return _set_thresholds(on_heap=_LARGEST_ON_HEAP_BYTES, kept=_KEPT_BYTES)


def trim_freed_memory() -> None:
    """Return the pages that this process has freed to the system; without glibc nothing.

    Versions of glibc seldom use aligned pieces again, as torch asks for them: the example of ``train sft`` grew by 0.5 GiB a
    step, to 20 GiB after 40.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_freed_memory() -> bool:
    """Let this process return freed memory to the system at once from now on, except pieces below 64 KiB.

    Without glibc it does nothing and returns False. For measuring what a process needs: by default, steps of a 10 M
    Llama that use at most 223 MB grow to 290.
    """
    if not _set_thresholds(on_heap=_SMALLEST_RETURNED_BYTES, kept=_SMALLEST_RETURNED_BYTES):
        return False
    trim_freed_memory()
    return True


def _set_thresholds(*, on_heap: int, kept: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting the thresholds also stops glibc from adjusting them.
    return bool(mallopt(_M_MMAP_THRESHOLD, on_heap) and mallopt(_M_TRIM_THRESHOLD, kept))
