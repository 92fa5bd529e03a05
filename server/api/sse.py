"""Server-sent events, and noticing that the client has gone.

A stream's frames are bytes, made by the caller; this file sends them, and closes their generator the moment the client
hangs up, so that the engine stops computing for nobody.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def frame(event: msgspec.Struct) -> bytes:
    """One event; JSON holds no raw line break, so one ``data:`` line carries it."""
    return b"data: " + _encoder.encode(event) + b"\n\n"


class ClientGoneError(Exception):
    """The client closed its connection before the answer was ready."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client hangs up first.

    The request's body must have been read: until then ``receive`` brings the body.

    Raises:
        ClientGoneError: the client hung up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        # No deadline here: the work ends by itself, because the engine client fails every wait on a dead or hung rank.
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _end(task, gone)


class EventStream(StreamingResponse):
    """Sends frames as they come. The generator is closed when it ends, breaks, or the client hangs up."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        # Proxies must neither keep nor gather the events (nginx buffers unless told).
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, headers=headers, media_type="text/event-stream")
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _end(pump, gone)
            await self._frames.aclose()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its clean-up, so that nothing outlives the request."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
