"""A thread that runs collectives in order while the caller computes.

What travels over a slow wire costs no core's time; so while one part of a prompt is being summed the next is computed. All
ranks start the same collectives in the same order, and nothing else uses the group until the last one is waited for.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch
from torch import Tensor

from tightwire.comm.ledger.ledger import Ledger


class InFlight:
    """A collective, or several, that the lane was given."""

    def __init__(self, result: "Future[tuple[Tensor, float, float]]", ledger: Ledger) -> None:
        self._result, self._ledger = result, ledger

    def wait(self) -> Tensor:
        """Its result. What it raised is raised here.

        The ledger learns how much of its time nobody waited for.
        """
        start_s = perf_counter()
        total, comm_s, coding_s = self._result.result()
        hidden = 1 - min(1.0, (perf_counter() - start_s) / comm_s) if comm_s else 0.0
        self._ledger.hide(hidden * comm_s, hidden * coding_s)
        return total


class CommLane:
    """For CPU tensors. Its thread is made at the first use and has the cores of the thread that uses it."""

    def __init__(self, ledger: Ledger) -> None:
        """``ledger``: of the group whose collectives will run here."""
        self._ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tightwire-comm")
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], Tensor]) -> InFlight:
        """Run ``work`` after all that was started before."""
        return InFlight(self._thread.submit(self._run, work), self._ledger)

    def _run(self, work: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
        if self._failure is not None:
            raise self._failure  # the group is of no use any more: what follows would wait for its deadline
        comm_s, coding_s = self._ledger.busy()
        try:
            with torch.inference_mode():
                total = work()
        except BaseException as failure:
            self._failure = failure
            raise
        after_s, coding_after_s = self._ledger.busy()
        return total, after_s - comm_s, coding_after_s - coding_s
