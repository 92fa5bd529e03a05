"""Several threads on one kernel: they draw work items from a shared counter, so they finish together.

Kernels release the GIL, hence plain Python threads do. numba's own ``parallel=True`` is not used: its default pool
aborts the process when two threads call it at once, which in-process ranks do, and others need a system library.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

# Some 50 us of the row kernels' work, above what waking a helper costs.
_CHUNK_ELEMS = 1 << 17


def run_on_threads(work: Callable[[], object], max_threads: int) -> None:
    """Call ``work`` in this thread and, at once, in up to ``max_threads - 1`` helpers; return when all are done.

    ``work`` takes items until none is left. A helper that has not started by the time this thread runs out of items
    is called off. At most ``torch.get_num_threads()`` threads run, so rank processes with one thread each stay apart.

    Cost: about 20 us to wake a helper; below some 100 us of work, ask for one thread.
    """
    num_helpers = min(max_threads, torch.get_num_threads()) - 1
    if num_helpers < 1:
        work()
        return
    helpers = [_pool().submit(work) for _ in range(num_helpers)]
    try:
        work()
    finally:
        # Helpers hold addresses of the caller's tensors: none may outlive this call.
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def run_on_rows(run: Callable[[int, int], None], num_rows: int, row_elems: int) -> None:
    """Call ``run(start, stop)`` over all rows, in this thread when they are few, else in chunks on several.

    Rows must be independent of each other, so that the cut changes nothing but the time.
    """
    if num_rows * row_elems <= _CHUNK_ELEMS or torch.get_num_threads() == 1:
        run(0, num_rows)
        return
    chunk_rows = max(1, _CHUNK_ELEMS // row_elems)
    starts = iter(range(0, num_rows, chunk_rows))  # shared: taking from a range's iterator is atomic

    def take_chunks() -> None:
        for start in starts:
            run(start, min(start + chunk_rows, num_rows))

    run_on_threads(take_chunks, -(-num_rows // chunk_rows))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="tightwire-kernel")


# Threads do not survive a fork; the child makes its own pool at first use.
os.register_at_fork(after_in_child=_pool.cache_clear)
