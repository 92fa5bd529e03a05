"""Runs uvicorn on a socket that is already bound, in an event loop and with signals that ``cli/launch`` controls."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Self

import uvicorn

_KEEP_ALIVE_S = 75  # longer than common clients keep an idle connection, so that the client closes it, not the server
_LAST_RESPONSES_S = 3


class HttpServer(uvicorn.Server):
    """Serves while its context is open; when it closes, finishes the last responses."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_RESPONSES_S,
            )
        )
        self._listener = listener
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self.serve(sockets=[self._listener]), name="http")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._serving is not None
        self.should_exit = True
        await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ignore signals: ``launch`` drains the engine before this server closes."""
        yield
