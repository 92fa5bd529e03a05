"""Runs kernels of the library on one thread, or on several of torch's OpenMP."""

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tightwire.kernels.cpu.library import lib

# How a tensor's numbers are stored, for kernels (native/numbers.h).
NUMBER_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_KIND = {**NUMBER_KIND, torch.int8: -1}  # of a KV cache

# Work of the row kernels worth another thread (about 80 us), and the least to give it at a time (20 us).
_ELEMS_PER_THREAD, _ELEMS_AT_ONCE = 1 << 16, 1 << 14

_log = logging.getLogger(__name__)


def addresses(*tensors: Tensor | None) -> list[int]:
    """Return each tensor's address as kernels take it, 0 for one that is not there."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def run_on_items(name: str, arguments: Any, num_items: int, items_at_once: int, max_threads: int) -> None:
    """Call the kernel ``name`` over all items: in one call, or in steps on torch's threads if ``max_threads`` is at least 2.

    Cost: starting several threads takes about 5 us, or 50 us after a few idle milliseconds; use one thread for less than
    50 us of work.
    """
    num_threads = torch.get_num_threads()
    if min(max_threads, num_threads) < 2:
        getattr(lib, name)(arguments, 0, num_items)
    else:
        _use_torchs_threads()
        # Always torch's own number: OpenMP ends the threads that a smaller team leaves out, and starts them anew.
        lib.tw_run(getattr(lib, name), arguments, num_items, items_at_once, num_threads)


def run_on_rows(name: str, arguments: Any, num_rows: int, row_elems: int) -> None:
    """``run_on_items`` of rows, on several threads when there are many."""
    rows_at_once = max(1, _ELEMS_AT_ONCE // max(1, row_elems))
    run_on_items(name, arguments, num_rows, rows_at_once, num_rows * row_elems // _ELEMS_PER_THREAD)


@cache
def _use_torchs_threads() -> None:
    """Give the library torch's OpenMP."""
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if parallel is None:
        _log.warning("torch %s has no OpenMP that the kernels can use; they run on one thread", torch.__version__)
    lib.tw_set_parallel(ctypes.cast(parallel, ctypes.c_void_p).value if parallel else 0)
