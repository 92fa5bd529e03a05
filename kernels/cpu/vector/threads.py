"""Several threads on one kernel, which draw items of work, so that they finish together.

They are the threads of torch's OpenMP, which spin for some milliseconds behind each of torch's own products. Others,
Python's or numba's, would share the cores with them: attention behind a product takes as long on two such threads as
on one. How many there are is torch's setting, so rank processes with one thread each stay apart.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tightwire.kernels.cpu.vector.regions import run_region

# Of the row kernels' work: some 80 us, worth another thread, and 20 us, of which the last may have to wait for one.
_ELEMS_PER_THREAD, _ELEMS_AT_ONCE = 1 << 16, 1 << 14


def run_on_items(
    kernel: Any, arguments: Sequence[int | float], num_items: int, items_at_once: int, max_threads: int
) -> None:
    """Call ``kernel(*arguments, start, stop)`` over all items: at once, or in turns on up to ``max_threads`` threads.

    Items must be independent of each other, so that the cut changes nothing but the time.

    Cost: of several threads that of ``regions.run_region``; below some 50 us of work, ask for one.
    """
    num_threads = torch.get_num_threads()
    if min(max_threads, num_threads) < 2:
        kernel(*arguments, 0, num_items)
    else:
        # Always torch's own number: OpenMP ends the threads that a smaller team leaves out, and starts them anew.
        run_region(kernel, arguments, num_items, items_at_once, num_threads)


def run_on_rows(kernel: Any, arguments: Sequence[int | float], num_rows: int, row_elems: int) -> None:
    """``run_on_items`` of rows, on several threads when they are many."""
    rows_at_once = max(1, _ELEMS_AT_ONCE // row_elems)
    run_on_items(kernel, arguments, num_rows, rows_at_once, num_rows * row_elems // _ELEMS_PER_THREAD)


def run_on_threads(kernel: Any, arguments: Sequence[int | float], max_threads: int) -> None:
    """Call ``kernel(*arguments, number)`` with each number below ``max_threads``, on so many threads if torch has them.

    The kernel draws its work from a counter of its own. One call may come after another, on one thread: it must find that
    nothing is left to do.
    """
    num_threads = torch.get_num_threads()
    if min(max_threads, num_threads) < 2:
        kernel(*arguments, 0)
    else:
        run_region(kernel, arguments, max_threads, 1, num_threads)
