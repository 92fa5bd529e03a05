"""A deadline for calls of libraries that wait for other ranks without one."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from tightwire.comm.errors import CommError

_T = TypeVar("_T")


def within(timeout_s: float, make: Callable[[], _T], late: Callable[[], str]) -> _T:
    """The result of ``make``, which runs in a thread that nobody awaits any longer after ``timeout_s``.

    CommError: it is late; ``late`` gives the message.
    """
    made: Future[_T] = Future()

    def run() -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled: what comes late is dropped
            try:
                made.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                made.set_exception(error)

    threading.Thread(target=run, daemon=True, name="connects").start()
    try:
        return made.result(timeout_s)
    except TimeoutError:
        made.cancel()
        raise CommError(late()) from None
