"""Runs one request's sequences and writes the response, whole or streamed; cancels them when the client disconnects.

A broken stream ends with an error event.
"""

import asyncio
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tightwire.server.api.errors import ApiError, json_response, to_api_error
from tightwire.server.api.generation import Delta, Prompt, TokenSequence, generate
from tightwire.server.api.logprobs import PromptLogprobs, prompt_logprobs
from tightwire.server.api.request_bodies import GenerationBody, SamplingBody, StreamOptions
from tightwire.server.api.response_bodies import PromptTokensDetails, Usage
from tightwire.server.api.serving import ServedModel
from tightwire.server.api.trace import Extra, RequestTrace, TightwireExtra, Tokens
from tightwire.server.ipc.engine_client import EngineClient

BodyT = TypeVar("BodyT", bound=GenerationBody)
T = TypeVar("T")
StreamUsage = Usage | None | UnsetType  # null in a stream whose last chunk has the usage

_encoder = msgspec.json.Encoder()


async def unless(ended: Awaitable[object], work: Awaitable[T], error: Exception) -> T:
    """The result of ``work``; cancels it and raises ``error`` once ``ended`` returns."""
    task, end = asyncio.ensure_future(work), asyncio.ensure_future(ended)
    try:
        await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error
        return task.result()
    finally:
        task.cancel()
        end.cancel()
        await asyncio.gather(task, end, return_exceptions=True)  # so that no task outlives the request
        del error  # its traceback holds this frame, and so all that the request has made


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``; on a disconnect cancels it and raises ApiError 499. The body must have been read.

    No deadline here: the engine client fails every wait on a dead or hung rank, so the work always ends.
    """
    return await unless(_wait_for_disconnect(receive), work, ApiError(499, "the client closed its connection"))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events. ``close`` runs when they end, or when the client disconnects."""

    def __init__(self, frames: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]) -> None:
        # Proxies must neither store nor collect the events (nginx buffers by default).
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self._frames, self._close = frames, close
        super().__init__(frames, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ApiError):  # 499: the client has gone
                await cancel_on_disconnect(receive, self.stream_response(send))
        finally:
            await self._frames.aclose()
            await self._close()


def encode_frame(event: Struct) -> bytes:
    """One event; its name is the struct's tag or type. JSON has no raw line break, so one ``data:`` line carries it."""
    name = event.__struct_config__.tag or getattr(event, "type", None)
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + _encoder.encode(event) + b"\n\n"


def _encode_frames(events: Iterable[Struct]) -> bytes:
    return b"".join(map(encode_frame, events))


class HeadedBody(Struct):
    """The fields that every body of one request shares; ``UNSET`` ones are left out of the JSON, ``None`` is null."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Dialect(ABC, Generic[BodyT]):
    """One API: its request bodies to prompts, its deltas to response bodies. Each request has its own instance."""

    body_type: ClassVar[type[SamplingBody]]  # of a request
    whole_type: ClassVar[Callable[..., HeadedBody]]
    chunk_type: ClassVar[Callable[..., HeadedBody]]
    id_prefix: ClassVar[str]
    end_of_stream: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(self, body: BodyT, model: ServedModel) -> None:
        self.body, self.model = body, model
        self.stream_options = body.stream_options or StreamOptions.model_construct()
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.policy = model.info.policy(body.tightwire)
        self.name_of = "token_id:{}".format if body.return_tokens_as_token_ids else model.tokens.text_of
        self.take_adapter()

    def take_adapter(self) -> int:
        """Answer with the version that the adapter has now; returns its id, 0: none. ApiError 404: it was unloaded."""
        adapter = self.model.info.adapter(self.body.model)
        fingerprint = self.model.info.fingerprint(self.policy, adapter)
        self.model_name = adapter.name if adapter else self.model.info.name
        self._heading = (self.id, int(time.time()), self.model_name, fingerprint)
        return adapter.id if adapter else 0

    @abstractmethod
    async def prompts(self) -> list[Prompt]:
        """The tokens of each prompt. Raises ApiError 400."""

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: Any, finish_reason: str | None = None) -> Struct:
        """A choice in a chunk."""

    @abstractmethod
    def choice(self, delta: Delta, logprobs: Any, of_prompt: PromptLogprobs | UnsetType) -> Struct:
        """A choice of the whole answer."""

    @abstractmethod
    def logprobs(self, delta: Delta) -> Struct: ...

    def in_own_words(self, error: ApiError) -> ApiError:
        """The error with the names that the fields have in this API."""
        return error

    def chunks(self, delta: Delta, usage: StreamUsage) -> Iterator[Struct]:
        """The stream's chunks for this delta: content first, then the finish reason in a separate chunk."""
        logprobs = self._logprobs(delta)
        if delta.text:
            yield self.chunk([self.piece(delta.index, delta.text, logprobs)], usage)
            logprobs = None
        if delta.finish_reason is not None:
            yield self.chunk([self.piece(delta.index, "", logprobs, delta.finish_reason)], usage)

    def chunk(self, choices: Sequence[Struct], usage: StreamUsage, extra: Extra = UNSET) -> HeadedBody:
        return self.chunk_type(*self._heading, choices=choices, usage=usage, tightwire=extra)

    def last_chunks(self, usage: Usage, extra: Extra) -> Iterator[Struct]:
        """The chunks after the last delta."""
        if self.stream_options.include_usage or extra is not UNSET:
            yield self.chunk([], usage if self.stream_options.include_usage else UNSET, extra)

    def failure(self, error: ApiError) -> Iterator[Struct]:
        """The last events of a stream that breaks."""
        yield error.body()

    def whole(self, deltas: Sequence[Delta], usage: Usage, extra: Extra) -> Struct:
        choices = [self.choice(delta, self._logprobs(delta), self._of_prompt(delta)) for delta in deltas]
        return self.whole_type(*self._heading, choices=choices, usage=usage, tightwire=extra)

    def _logprobs(self, delta: Delta) -> Struct | None:
        return self.logprobs(delta) if self.body.num_logprobs is not None and delta.entries else None

    def _of_prompt(self, delta: Delta) -> PromptLogprobs | UnsetType:
        if self.body.prompt_logprobs is None or delta.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(delta.prompt_logprobs, self.model.tokens)


class Answer:
    def __init__(
        self,
        engine: EngineClient,
        dialect: Dialect[GenerationBody],
        sequences: list[TokenSequence],
        trace: RequestTrace,
    ) -> None:
        self._body, self._dialect, self._trace = dialect.body, dialect, trace
        self._sequences = {f"{dialect.id}-{sequence.index}": sequence for sequence in sequences}
        self._deltas = generate(engine, self._sequences, trace, self._body, dialect.policy, dialect.take_adapter)
        record = trace.record
        record.asked, record.model, record.response_id = self._body, dialect.model_name, dialect.id
        record.count_tokens = self._count_tokens

    async def respond(self, request: Request) -> Response:
        """The response. An error before the first chunk sets the status; a later one is an event of the stream."""
        if not self._body.stream:
            return await cancel_on_disconnect(request.receive, self._whole())
        first = await cancel_on_disconnect(request.receive, anext(self._deltas))
        return EventStream(self._frames(first), self._deltas.aclose)

    async def _whole(self) -> Response:
        choices: dict[int, Delta] = {}
        async with contextlib.aclosing(self._deltas):
            async for delta in self._deltas:
                choices.setdefault(delta.index, Delta(delta.index)).append(delta)
        in_order = [choices[index] for index in sorted(choices)]
        return json_response(self._dialect.whole(in_order, self._usage(), self._extra()))

    async def _frames(self, first: Delta) -> AsyncGenerator[bytes, None]:
        dialect = self._dialect
        try:
            yield self._encode(first)
            while first.progress is not None:
                first = await anext(self._deltas)
                yield self._encode(first)
            self._trace.sent()
            async for delta in self._deltas:
                yield self._encode(delta)
            yield _encode_frames(dialect.last_chunks(self._usage(), self._extra()))
        except Exception as error:  # noqa: BLE001 - the status is already sent, so only an event can tell the client
            told = to_api_error(error)
            try:
                yield _encode_frames(dialect.failure(told))
            except UnicodeEncodeError:  # the events repeat the text that could not be encoded
                yield encode_frame(told.body())
        yield dialect.end_of_stream

    def _encode(self, delta: Delta) -> bytes:
        dialect = self._dialect
        usage: StreamUsage = None if dialect.stream_options.include_usage else UNSET
        if dialect.stream_options.include_usage and dialect.stream_options.continuous_usage_stats:
            usage = self._usage(delta.index)
        if delta.progress is not None:
            extra = TightwireExtra(progress=delta.progress)
            return encode_frame(dialect.chunk([dialect.piece(delta.index, "", None)], usage, extra))
        return _encode_frames(dialect.chunks(delta, usage))

    def _usage(self, index: int | None = None) -> Usage:
        """Counts each prompt once, however many answers it has. ``index``: only the tokens of this answer."""
        sequences = [s for s in self._sequences.values() if index in (None, s.index)]
        firsts = [s for s in sequences if s.index % self._body.n == 0 or index is not None]
        prompt = sum(len(sequence.prompt.token_ids) for sequence in firsts)
        completion = sum(len(sequence.token_ids) for sequence in sequences)
        cached = PromptTokensDetails(sum(sequence.num_cached_tokens for sequence in firsts))
        return Usage(prompt, completion, prompt + completion, cached)

    def _count_tokens(self) -> Tokens:
        if self._trace.record.submitted_s is None or "refused" in self._trace.record.finish_reasons:
            return Tokens()
        usage = self._usage()
        return Tokens(usage.prompt_tokens, usage.completion_tokens)

    def _extra(self) -> Extra:
        wanted = self._body.tightwire
        if not (wanted.comm or wanted.timing or wanted.token_ids):
            return UNSET
        return TightwireExtra(
            comm=self._trace.comm_report() if wanted.comm else UNSET,
            timing=self._trace.timing if wanted.timing else UNSET,
            drafts=self._trace.draft_report() if wanted.timing else UNSET,
            token_ids=[s.token_ids for s in self._sequences.values()] if wanted.token_ids else UNSET,
        )
