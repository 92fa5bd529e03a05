"""A thread that runs communication in order while another thread computes; on CUDA it has its own stream.

All ranks give a lane the same collectives in the same order, and nothing else uses its group. A failure ends the lane:
it calls ``on_failure`` and starts no later work.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch

Work = Callable[[], None]


class Lane:
    def __init__(self, name: str, device: torch.device, on_failure: Callable[[BaseException], None]) -> None:
        self._name = name
        self._on_failure = on_failure
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._work: queue.SimpleQueue[tuple[Work, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_given = self._num_done = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"tightwire-{name}", daemon=True)
        self._thread.start()

    def start(self, work: Work) -> None:
        """Run ``work`` after all earlier work; on CUDA also after everything the caller has queued on its stream."""
        queued = None
        if self._stream is not None:
            queued = torch.cuda.Event()
            queued.record()
        with self._changed:
            self._num_given += 1
        self._work.put((work, queued))

    def finish(self, timeout_s: float) -> None:
        """Wait until all work is done.

        Raises:
            TimeoutError: the lane completed no work for ``timeout_s``.
            Exception: the failure that ended the lane.
        """
        with self._changed:
            seen, deadline = self._num_done, time.monotonic() + timeout_s
            while self._num_done < self._num_given:
                if self._failure is not None:
                    raise self._failure
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and self._num_done == seen:
                    left = self._num_given - self._num_done
                    raise TimeoutError(f"the {self._name} lane has done nothing for {timeout_s:g} s; {left} to do")
                if self._num_done != seen:
                    seen, deadline = self._num_done, time.monotonic() + timeout_s
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; wait at most ``timeout_s``. Waits for other ranks end when the group is closed."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while (given := self._work.get()) is not None:
                work, queued = given
                try:
                    if self._stream is not None and queued is not None:
                        self._stream.wait_event(queued)
                    work()
                except BaseException as failure:  # noqa: BLE001 - ``finish`` raises it
                    self._fail(failure)
                    return
                with self._changed:
                    self._num_done += 1
                    self._changed.notify_all()

    def _fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
        self._on_failure(failure)
