"""Runs the sequences of one generating request and writes the HTTP response, whole or streamed."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol, TypedDict

import msgspec
from fastapi import Request, Response
from msgspec import UNSET, UnsetType

from tightwire.server.api.event_stream import ClientGoneError, EventStream, cancel_on_disconnect
from tightwire.server.api.generation import Delta, Sequence, generate
from tightwire.server.api.responses import PromptTokensDetails, Usage
from tightwire.server.api.schemas import GenerationBody
from tightwire.server.api.serving import ServedModel, Serving
from tightwire.server.api.trace import RequestTrace, TightwireExtra


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
        return EventStream(self._events(first), self._deltas.aclose)

    async def _whole(self) -> Response:
        choices: dict[int, Delta] = {}
        async for delta in self._deltas:
            choices.setdefault(delta.index, Delta(delta.index)).append(delta)
        in_order = [choices[index] for index in sorted(choices)]
        content = msgspec.json.encode(self._dialect.whole(in_order, self._usage(), self._extra()))
        return Response(content, media_type="application/json")

    async def _events(self, first: Delta) -> AsyncGenerator[msgspec.Struct, None]:
        for chunk in self._dialect.chunks(first):
            yield chunk
        self._trace.sent()
        async for delta in self._deltas:
            for chunk in self._dialect.chunks(delta):
                yield chunk
        options, extra = self._body.stream_options, self._extra()
        wants_usage = options is not None and bool(options.include_usage)
        if wants_usage or extra is not UNSET:
            yield self._dialect.last_chunk(self._usage() if wants_usage else None, extra)

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
