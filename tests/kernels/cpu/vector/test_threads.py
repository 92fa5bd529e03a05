from collections.abc import Callable

import pytest
import torch

from tightwire.kernels.cpu.vector import regions
from tightwire.kernels.cpu.vector.atomics import load_acquire, yield_core
from tightwire.kernels.cpu.vector.jit import kernel
from tightwire.kernels.cpu.vector.simd import fetch_add, load_i64, splat, store, store_i64
from tightwire.kernels.cpu.vector.threads import run_on_items, run_on_rows, run_on_threads


@pytest.fixture(autouse=True)
def _four_threads(num_threads: Callable[[int], None]) -> None:
    num_threads(4)


@kernel
def count(counts: int, start: int, stop: int) -> None:
    for item in range(start, stop):
        fetch_add(counts + 8 * item)


@kernel
def meet(came: int, wanted: int, met: int, number: int) -> None:
    """Returns when ``wanted`` threads are inside at once; a later call finds that they were."""
    fetch_add(came)
    while load_acquire(came) < wanted:
        yield_core()
    fetch_add(met + 8 * number)


@kernel
def keep_arguments(target: int, number: int, factor: float, negated: bool, start: int, stop: int) -> None:
    store_i64(target, -number if negated else number)
    store(target + 64, splat(factor))
    store_i64(target + 8, load_i64(target + 8) + stop - start)


def test_threads_run_at_once() -> None:
    came, met = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    run_on_threads(meet, (came.data_ptr(), 3, met.data_ptr()), 3)
    assert met.tolist() == [1, 1, 1]


def test_torch_limits_the_threads() -> None:
    torch.set_num_threads(1)
    came, met = torch.zeros(1, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    run_on_threads(meet, (came.data_ptr(), 1, met.data_ptr()), 8)
    assert met.tolist() == [1] + 7 * [0]


@pytest.mark.parametrize("max_threads", [1, 2, 9])
@pytest.mark.parametrize(("num_items", "at_once"), [(0, 4), (1, 4), (7, 2), (1000, 3)])
def test_every_item_once(num_items: int, at_once: int, max_threads: int) -> None:
    counts = torch.zeros(num_items, dtype=torch.int64)
    run_on_items(count, (counts.data_ptr(),), num_items, at_once, max_threads)
    assert counts.eq(1).all()


@pytest.mark.parametrize(("num_rows", "row_elems"), [(0, 8), (1, 8), (1, 1 << 20), (1000, 1000), (7, 1 << 17)])
def test_every_row_once(num_rows: int, row_elems: int) -> None:
    counts = torch.zeros(num_rows, dtype=torch.int64)
    run_on_rows(count, (counts.data_ptr(),), num_rows, row_elems)
    assert counts.eq(1).all()


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("max_threads", [1, 2])
def test_numbers_of_all_kinds_reach_the_kernel(max_threads: int, negated: bool) -> None:
    target = torch.zeros(24, dtype=torch.int64)
    run_on_items(keep_arguments, (target.data_ptr(), 1 << 40, -0.1, negated), 5, 5, max_threads)
    assert target[:2].tolist() == [-(1 << 40) if negated else 1 << 40, 5]
    assert target[8:16].view(torch.float32).tolist() == torch.full((16,), -0.1).tolist()


def test_a_torch_without_openmp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions.ctypes, "CDLL", lambda name: object())
    regions._parallel.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="no OpenMP.*OMP_NUM_THREADS=1"):
            run_on_items(count, (0,), 2, 1, 2)
    finally:
        regions._parallel.cache_clear()
