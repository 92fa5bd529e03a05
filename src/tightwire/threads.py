"""Daemon threads: reading and tokenizing data ahead, so that a step does not wait for it, and calls that no exit waits for.

Both hand on every error, also the panics of Rust's libraries, which are no ``Exception``.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

_POLL_S = 0.1
_PATIENCE_S = 2.0  # how long `close` waits for the thread

T = TypeVar("T")


class ClosedError(Exception):
    """The reader was closed."""


def until_closed(items: Iterable[T], closed: threading.Event) -> Iterator[T]:
    """``items``, also of a source that may skip many before it yields one. Raises ClosedError: ``closed`` was set."""
    for item in items:
        if closed.is_set():
            raise ClosedError
        yield item


class ReadAhead(Generic[T]):
    """Keeps up to ``depth`` items of ``source`` ready. An error of the source is raised in the place of its item."""

    def __init__(self, source: Iterator[T], depth: int, closed: threading.Event | None = None) -> None:
        """``closed``: ``close`` sets it; the source can check it."""
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = closed or threading.Event()
        self._thread = threading.Thread(target=self._run, args=(source,), name="read-ahead", daemon=True)
        self._thread.start()

    def get(self, give_up: Callable[[], object]) -> T | None:
        """The next item, or None when ``give_up()`` is true before it comes."""
        while True:
            try:
                item, error = self._ready.get(timeout=_POLL_S)
                break
            except queue.Empty:
                if give_up():
                    return None
        if error is not None:
            self._put((None, error))  # later calls raise the same error
            raise error
        return item

    def close(self) -> None:
        """End the thread and drop its items. If the source blocks, the thread stays until the process ends."""
        self._closed.set()
        self._thread.join(_PATIENCE_S)

    def _run(self, source: Iterator[T]) -> None:
        try:
            for item in source:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # noqa: BLE001 - the reader gets every error
            self._put((None, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(entry, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False


class Background(Generic[T]):
    """Runs ``call`` in a daemon thread, which does not delay the exit as ``asyncio.to_thread`` does; await ``result``."""

    def __init__(self, call: Callable[[], T]) -> None:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        outcome.set_running_or_notify_cancel()  # from here on, cancelling ``result`` does not touch it
        self.result = asyncio.wrap_future(outcome)
        self._thread = threading.Thread(target=self._run, args=(call, outcome), daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether the call has ended within ``timeout_s``, with or without a result."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, call: Callable[[], T], outcome: "concurrent.futures.Future[T]") -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            try:
                outcome.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                outcome.set_exception(error)
