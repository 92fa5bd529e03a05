"""Runs communication in order while the caller computes: in a thread, or on CUDA in a stream of its own.

All ranks give a lane the same collectives in the same order, and nothing else uses its group while work is
unfinished. A failure ends the lane. On CUDA the caller queues the work itself: the calls of several lanes have one order
then, the same on all ranks, without which NCCL's communicators of one device may wait for each other for ever.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter

import torch
from torch import Tensor

from tightwire.comm.ledger.ledger import Ledger


class Pending:
    """The work that a lane was given: its result, once there is one."""

    def __init__(self, ledger: Ledger) -> None:
        # The result, the seconds in collectives, those of them spent coding, and on CUDA the event after which the result is ready.
        self.done: Future[tuple[Tensor | None, float, float, torch.cuda.Event | None]] = Future()
        self._ledger = ledger

    def wait(self) -> Tensor:
        """Return the result, or raise the error of this or earlier work. The ledger records the time not waited for.

        On CUDA the caller's stream waits for the result, and the host does not.
        """
        start_s = perf_counter()
        result, comm_s, coding_s, ready = self.done.result()
        self._ledger.waited_s += (waited_s := perf_counter() - start_s)
        hidden = 1 - min(1.0, waited_s / comm_s) if comm_s else 0.0
        self._ledger.hide(hidden * comm_s, hidden * coding_s)
        assert result is not None
        if ready is not None and result.is_cuda:
            ready.wait()
            result.record_stream(torch.cuda.current_stream())
        return result


class Lane:
    """Runs work in a single thread, which starts with the first work and has the core affinity of its creator; on CUDA without one."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        on_failure: Callable[[BaseException], None] = lambda failure: None,
        *,
        ledger: Ledger | None = None,
    ) -> None:
        """Make a lane; the lane's thread calls ``on_failure`` with the error that ended it. ``ledger`` is the group's."""
        self._name, self._on_failure, self._ledger = name, on_failure, ledger or Ledger()
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_given = self._num_done = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Tensor | None]) -> Pending:
        """Run ``work`` after all earlier work; on CUDA also after everything the caller has queued on its stream."""
        pending, inference = Pending(self._ledger), torch.is_inference_mode_enabled()
        with self._changed:
            self._num_given += 1
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.no_grad(), torch.cuda.stream(self._stream):
                self._do(work, pending, inference=inference)
            return pending
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"tightwire-{self._name}", daemon=True)
            self._thread.start()
        self._work.put(lambda: self._do(work, pending, inference=inference))
        return pending

    def finish(self, timeout_s: float) -> None:
        """Wait until all work is done. Raises TimeoutError if none ended for ``timeout_s``; or the lane's failure."""
        with self._changed:
            seen, deadline = self._num_done, time.monotonic() + timeout_s
            while self._num_done < self._num_given:
                if self._failure is not None:
                    raise self._failure
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and self._num_done == seen:
                    left = self._num_given - self._num_done
                    raise TimeoutError(f"the {self._name} lane completed nothing for {timeout_s:g} s; {left} not done")
                if self._num_done != seen:
                    seen, deadline = self._num_done, time.monotonic() + timeout_s
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; wait at most ``timeout_s``. Waits for other ranks end when the group is closed."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with torch.no_grad():
            while (given := self._work.get()) is not None:
                given()
                del given  # and with it the tensors of the work

    def _do(self, work: Callable[[], Tensor | None], pending: Pending, *, inference: bool) -> None:
        if self._failure is not None:  # the group is unusable: this work would wait for its deadline
            pending.done.set_exception(self._failure)
            return
        try:
            comm_s, coding_s = self._ledger.busy()
            with torch.inference_mode(inference):
                result = work()
            comm_after_s, coding_after_s = self._ledger.busy()
        except BaseException as failure:  # noqa: BLE001 - ``finish`` or ``Pending.wait`` raises it
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
            pending.done.set_exception(failure)
            self._on_failure(failure)
            return
        if (ready := None if self._stream is None else torch.cuda.Event()) is not None:
            ready.record()
        pending.done.set_result((result, comm_after_s - comm_s, coding_after_s - coding_s, ready))
        with self._changed:
            self._num_done += 1
            self._changed.notify_all()
