"""Runs the sequences of one generating request and writes the HTTP response, whole or streamed.

A stream that breaks ends with an error event. A client that disconnects cancels its sequences.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Protocol, TypedDict, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import UNSET, UnsetType
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tightwire.server.api.disconnect import ClientGoneError, cancel_on_disconnect, end_tasks, wait_for_disconnect
from tightwire.server.api.errors import to_api_error
from tightwire.server.api.generation import Delta, Sequence, generate
from tightwire.server.api.responses import PromptTokensDetails, Usage
from tightwire.server.api.schemas import GenerationBody
from tightwire.server.api.serving import ServedModel, Serving
from tightwire.server.api.trace import RequestTrace, TightwireExtra

T = TypeVar("T")

_DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class EventStream(StreamingResponse):
    """Server-sent events. ``close`` runs when they end, or when the client disconnects."""

    def __init__(self, frames: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        # Proxies must neither store nor collect the events (nginx buffers by default).
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self._frames, self._close = frames, close
        super().__init__(frames, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await end_tasks(sending, gone)
            await self._frames.aclose()
            await self._close()


def encode_frame(event: msgspec.Struct) -> bytes:
    """One event; JSON has no raw line break, so one ``data:`` line carries it."""
    return b"data: " + _encoder.encode(event) + b"\n\n"


class Heading(TypedDict):
    """The fields of ``HeadedBody``."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class HeadedBody(msgspec.Struct):
    """The fields that every body and chunk of an answer begins with.

    ``UNSET`` fields of a body are left out of the JSON; ``None`` is written as null where OpenAI writes it.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str


class Dialect(Protocol):
    """Converts deltas to one API's bodies. Each request has its own instance, which may keep state."""

    def chunks(self, delta: Delta) -> Iterator[msgspec.Struct]:
        """The stream's chunks for this delta: content first, then the finish reason in a separate chunk."""
        ...

    def last_chunk(self, usage: Usage | None, extra: TightwireExtra | UnsetType) -> msgspec.Struct:
        """The chunk without choices that ends a stream if usage or an extra was requested."""
        ...

    def whole(self, choices: list[Delta], usage: Usage, extra: TightwireExtra | UnsetType) -> msgspec.Struct: ...


def make_heading(prefix: str, model: ServedModel, body: GenerationBody) -> Heading:
    return Heading(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model.info.name,
        system_fingerprint=model.info.fingerprint(body.tightwire.allreduce),
    )


class Answer:
    """Runs one request's sequences and makes the response."""

    def __init__(
        self,
        serving: Serving,
        body: GenerationBody,
        sequences: list[Sequence],
        dialect: Dialect,
        trace: RequestTrace,
        id: str,
    ) -> None:
        self._body, self._dialect, self._trace = body, dialect, trace
        self._sequences = {f"{id}-{sequence.index}": sequence for sequence in sequences}
        self._deltas = generate(serving.engine, self._sequences, trace, body.tightwire.allreduce, body.cache_salt or "")

    async def respond(self, request: Request) -> Response:
        """The response. An error before the first token sets the status; a later one is an event of the stream."""
        try:
            if not self._body.stream:
                return await cancel_on_disconnect(request.receive, self._whole())
            first = await cancel_on_disconnect(request.receive, anext(self._deltas))
        except ClientGoneError:
            return Response(status_code=499)  # only access logs see it
        finally:
            if not self._body.stream:
                await self._deltas.aclose()
        return EventStream(self._frames(first), self._deltas.aclose)

    async def _whole(self) -> Response:
        choices: dict[int, Delta] = {}
        async for delta in self._deltas:
            choices.setdefault(delta.index, Delta(delta.index)).append(delta)
        in_order = [choices[index] for index in sorted(choices)]
        content = msgspec.json.encode(self._dialect.whole(in_order, self._usage(), self._extra()))
        return Response(content, media_type="application/json")

    async def _frames(self, first: Delta) -> AsyncGenerator[bytes, None]:
        try:
            yield self._encode(first)
            self._trace.sent()
            async for delta in self._deltas:
                yield self._encode(delta)
            options, extra = self._body.stream_options, self._extra()
            wants_usage = options is not None and bool(options.include_usage)
            if wants_usage or extra is not UNSET:
                yield encode_frame(self._dialect.last_chunk(self._usage() if wants_usage else None, extra))
        except Exception as error:  # noqa: BLE001 - the status is already sent, so only an event can tell the client
            yield encode_frame(to_api_error(error).body())
        yield _DONE

    def _encode(self, delta: Delta) -> bytes:
        return b"".join(map(encode_frame, self._dialect.chunks(delta)))

    def _usage(self) -> Usage:
        """Counts each prompt once, however many answers it has."""
        sequences = self._sequences.values()
        firsts = [sequence for sequence in sequences if sequence.index % self._body.n == 0]
        prompt = sum(len(sequence.prompt_token_ids) for sequence in firsts)
        completion = sum(len(sequence.token_ids) for sequence in sequences)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(sum(sequence.num_cached_tokens for sequence in firsts)),
        )

    def _extra(self) -> TightwireExtra | UnsetType:
        wanted = self._body.tightwire
        if not (wanted.comm or wanted.timing or wanted.token_ids):
            return UNSET
        return TightwireExtra(
            comm=self._trace.comm_report() if wanted.comm else UNSET,
            timing=self._trace.timing if wanted.timing else UNSET,
            token_ids=[s.token_ids for s in self._sequences.values()] if wanted.token_ids else UNSET,
        )
