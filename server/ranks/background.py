"""Runs one slow call beside the loop without delaying the process's exit, unlike ``asyncio.to_thread``."""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Background(Generic[_T]):
    """Starts ``call`` in a daemon thread; await ``result`` on the loop that created this object."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[_T] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether the call has ended within ``timeout_s``, with or without a result."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            value = self._call()
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            self._settle(self.result.set_exception, error)
        else:
            self._settle(self.result.set_result, value)

    def _settle(self, settle: Callable[..., None], value: object) -> None:
        def on_loop() -> None:
            if not self.result.done():  # cancelled: nobody waits for it
                settle(value)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(on_loop)
