"""Sums over processes that share memory: the words of native/shared_sums.cpp, and a process's view of a board.

Kernels are called as ``lib.tw_one_shot(board, ...)``; native/kernels.h declares them.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from tightwire.kernels.cpu.library import available, struct

# Words of a line.
TURN, CALLS = 0, 1  # two calls, which alternate as the buffers do

# What a kernel returns instead of a step.
DONE, MISMATCH = -1, -2

# Operations of a call; a transport may number more, up to 7.
ONE_SHOT, TWO_SHOT = 1, 2
_OPERATION_SHIFT, _KIND_SHIFT, _DETAIL_SHIFT = 60, 56, 40

_PR_SET_TIMERSLACK = 29


def make_board(
    own: int, places: Sequence[tuple[int, tuple[int, int]]], *, num_spins: int, num_naps: int, chunk_bytes: int
) -> Any:
    """Return a ``tw_board *`` for kernels, whose fields these are; keep it alive as long as they run.

    ``places`` are for each process the addresses of its line and of its two buffers, in the calling process's memory.
    Raises RuntimeError if this machine has no compiled kernels.
    """
    if not available():
        raise RuntimeError("sums over shared memory need the compiled CPU kernels")
    return struct("tw_board", (own, len(places), num_spins, num_naps, chunk_bytes, places))


def call_word(operation: int, kind: int = 0, num_elems: int = 0, detail: int = 0) -> int:
    """Return a call as one word: operation 1 to 7, kind 0 to 15, num_elems below 2^40, detail any 16 bits."""
    return operation << _OPERATION_SHIFT | kind << _KIND_SHIFT | detail << _DETAIL_SHIFT | num_elems


def call_of(word: int) -> tuple[int, int, int]:
    """Return (operation, kind, number of elements) of a ``call_word``."""
    return word >> _OPERATION_SHIFT, word >> _KIND_SHIFT & 15, word & (1 << _DETAIL_SHIFT) - 1


def wake_on_time() -> None:
    """Let the calling thread's sleeps end within some microseconds of their time instead of 50 us later (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
