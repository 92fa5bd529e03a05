"""One slow call beside the loop that the process's end does not wait for, unlike ``asyncio.to_thread``'s."""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Background(Generic[_T]):
    """Runs ``call`` in a daemon thread from now on; await ``result`` on the loop it was made on."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[_T] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Whether the call came to its end within ``timeout_s``, result or not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            value = self._call()
        except Exception as error:  # noqa: BLE001 - it belongs to whoever awaits the result
            self._settle(self.result.set_exception, error)
        else:
            self._settle(self.result.set_result, value)

    def _settle(self, settle: Callable[..., None], value: object) -> None:
        def on_loop() -> None:
            if not self.result.done():  # cancelled: nobody wants it any more
                settle(value)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(on_loop)
