"""An iterator that a thread of its own runs ahead of its reader, so that reading and tokenizing take no time of a step."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Self, TypeVar

_POLL_S = 0.1
_PATIENCE_S = 2.0  # of who closes, with a source that says nothing

T = TypeVar("T")


class ClosedError(Exception):
    """Nobody reads any more."""


def until_closed(items: Iterable[T], closed: threading.Event) -> Iterator[T]:
    """``items`` for inside a source, which may go through many before it has one to give.

    Raises:
        ClosedError: ``closed`` was set meanwhile.
    """
    for item in items:
        if closed.is_set():
            raise ClosedError
        yield item


class ReadAhead(Generic[T]):
    """Up to ``depth`` items of ``source`` wait. An error of the source is raised where its item would have come."""

    def __init__(self, source: Iterator[T], depth: int, closed: threading.Event | None = None) -> None:
        """``closed``: set when the reader ends, for the source to look at."""
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = closed or threading.Event()
        self._thread = threading.Thread(target=self._run, args=(source,), name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item = self.get(lambda: False)
        assert item is not None
        return item

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
            self._put((None, error))  # whoever asks again hears the same
            raise error
        return item

    def close(self) -> None:
        """End the thread; what waits is dropped. One that a silent source holds is left to end with the process."""
        self._closed.set()
        self._thread.join(_PATIENCE_S)

    def _run(self, source: Iterator[T]) -> None:
        try:
            for item in source:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except Exception as error:  # noqa: BLE001, whatever it is goes to the reader
            self._put((None, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(entry, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
