"""A thread that runs collectives in order while the caller computes.

Transfers over a slow link use no core, so one part of a prompt is summed while the next is computed. All ranks start the
same collectives in the same order, and nothing else uses the group until the caller has waited for the last one.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import torch
from torch import Tensor

from tightwire.comm.ledger.ledger import Ledger


class InFlight:
    """One piece of work that the lane runs: a collective or several."""

    def __init__(self, result: "Future[tuple[Tensor, float, float]]", ledger: Ledger) -> None:
        self._result, self._ledger = result, ledger

    def wait(self) -> Tensor:
        """Return the result, or raise the error of the work.

        The ledger records how much of the work's time was hidden, that is, not waited for.
        """
        start_s = perf_counter()
        total, comm_s, coding_s = self._result.result()
        hidden = 1 - min(1.0, (perf_counter() - start_s) / comm_s) if comm_s else 0.0
        self._ledger.hide(hidden * comm_s, hidden * coding_s)
        return total


class CommLane:
    """Runs work in a single thread, made at first use with the core affinity of its creator. For CPU tensors."""

    def __init__(self, ledger: Ledger) -> None:
        """``ledger``: of the group whose collectives run here."""
        self._ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tightwire-comm")
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], Tensor]) -> InFlight:
        """Run ``work`` after all work started before."""
        return InFlight(self._thread.submit(self._run, work), self._ledger)

    def _run(self, work: Callable[[], Tensor]) -> tuple[Tensor, float, float]:
        if self._failure is not None:
            raise self._failure  # the group is unusable: later work would wait for its deadline
        comm_s, coding_s = self._ledger.busy()
        try:
            with torch.inference_mode():
                total = work()
        except BaseException as failure:
            self._failure = failure
            raise
        after_s, coding_after_s = self._ledger.busy()
        return total, after_s - comm_s, coding_after_s - coding_s
