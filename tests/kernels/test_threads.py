import threading
from collections.abc import Callable

import pytest
import torch

from tightwire.kernels.threads import run_on_rows, run_on_threads


@pytest.fixture(autouse=True)
def _four_threads(num_threads: Callable[[int], None]) -> None:
    num_threads(4)


def test_helpers_run_beside_the_caller() -> None:
    together = threading.Barrier(3, timeout=60)
    run_on_threads(together.wait, 3)  # returns only if three threads meet


def test_torch_limits_the_threads() -> None:
    torch.set_num_threads(1)
    callers = []
    run_on_threads(lambda: callers.append(threading.get_ident()), 8)
    assert callers == [threading.get_ident()]


def test_returns_when_the_last_helper_is_done() -> None:
    started, finished = threading.Barrier(2, timeout=60), []

    def work() -> None:
        started.wait()
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait(0.05)
        finished.append(1)

    run_on_threads(work, 2)
    assert len(finished) == 2


@pytest.mark.parametrize("guilty", ["caller", "helper"])
def test_an_error_in_any_thread_reaches_the_caller(guilty: str) -> None:
    together = threading.Barrier(2, timeout=60)

    def work() -> None:
        together.wait()
        if (threading.current_thread() is threading.main_thread()) == (guilty == "caller"):
            raise ZeroDivisionError(guilty)

    with pytest.raises(ZeroDivisionError, match=guilty):
        run_on_threads(work, 2)


@pytest.mark.parametrize(("num_rows", "row_elems"), [(0, 8), (1, 8), (1, 1 << 20), (1000, 1000), (7, 1 << 17)])
def test_every_row_once(num_rows: int, row_elems: int) -> None:
    rows: list[int] = []
    run_on_rows(lambda start, stop: rows.extend(range(start, stop)), num_rows, row_elems)
    assert sorted(rows) == list(range(num_rows))
