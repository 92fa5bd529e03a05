"""Streams events to a client, ends a broken stream with an error event, and cancels when the client disconnects."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tightwire.server.api.errors import to_api_error

T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class ClientGoneError(Exception):
    """The client closed its connection before the answer was ready."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it if the client disconnects first.

    The request's body must have been read: until then ``receive`` returns the body.

    Raises:
        ClientGoneError: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        # No deadline here: the engine client fails every wait on a dead or hung rank, so the work always ends.
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _end(task, gone)


class EventStream(StreamingResponse):
    """Server-sent events. ``close`` runs when they end or fail, or when the client disconnects."""

    def __init__(self, events: AsyncGenerator[msgspec.Struct, None], close: Callable[[], Awaitable[None]]) -> None:
        # Proxies must neither store nor collect the events (nginx buffers by default).
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self._frames, self._close = _encode_frames(events), close
        super().__init__(self._frames, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _end(sending, gone)
            await self._frames.aclose()
            await self._close()


def encode_frame(event: msgspec.Struct) -> bytes:
    """One event; JSON has no raw line break, so one ``data:`` line carries it."""
    return b"data: " + _encoder.encode(event) + b"\n\n"


async def _encode_frames(events: AsyncGenerator[msgspec.Struct, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for event in events:
            yield encode_frame(event)
    except Exception as error:  # noqa: BLE001 - the status is already sent, so only an event can tell the client
        yield encode_frame(to_api_error(error).body())
    yield _DONE


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks that still run and wait for their cleanup, so that none outlives the request."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
