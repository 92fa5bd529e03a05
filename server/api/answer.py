"""One generating request from its sequences to an HTTP response, whole or streamed, in either dialect."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
from fastapi import Request, Response

from tightwire.server.api import sse
from tightwire.server.api.comm_watch import CommWatch
from tightwire.server.api.errors import to_api_error
from tightwire.server.api.generation import Delta, Sequence, generate
from tightwire.server.api.metrics import SequenceTimer
from tightwire.server.api.responses import PromptTokensDetails, TightwireExtra, Usage
from tightwire.server.api.schemas import GenerationBody
from tightwire.server.api.served_model import ServedModel
from tightwire.server.api.serving import Serving
from tightwire.server.api.ttft import TtftWatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """What every body and chunk of one answer repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Dialect(Protocol):
    """Writes deltas as one API's bodies. A fresh one for each request; it may remember what it has written."""

    def chunks(self, delta: Delta) -> Iterator[msgspec.Struct]:
        """The stream's chunks for this delta: content first, the finish reason in a chunk of its own."""
        ...

    def last_chunk(self, usage: Usage | None, extra: TightwireExtra | msgspec.UnsetType) -> msgspec.Struct:
        """The chunk without choices that ends a stream when usage or an extra was asked for."""
        ...

    def whole(
        self, choices: list[Delta], usage: Usage, extra: TightwireExtra | msgspec.UnsetType
    ) -> msgspec.Struct: ...


def make_heading(prefix: str, model: ServedModel, body: GenerationBody) -> Heading:
    return Heading(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model.info.name,
        system_fingerprint=model.info.fingerprint(body.tightwire.allreduce),
    )


class Answer:
    """Runs the sequences and writes what they bring."""

    def __init__(
        self,
        serving: Serving,
        body: GenerationBody,
        sequences: list[Sequence],
        *,
        request_id: str,
        dialect: Dialect,
        ttft: TtftWatch,
    ) -> None:
        self._body = body
        self._dialect = dialect
        self._sequences = {f"{request_id}-{sequence.index}": sequence for sequence in sequences}
        self._ttft = ttft
        self._watch = CommWatch(serving.engine, ttft.arrived_s)
        timers = {id_: SequenceTimer(serving.metrics, ttft.arrived_s) for id_ in self._sequences}
        self._deltas = generate(
            serving.engine, self._sequences, timers, ttft, body.tightwire.allreduce, body.cache_salt or ""
        )

    async def respond(self, request: Request) -> Response:
        """The response; errors before the first token have a status of their own, later ones a frame."""
        try:
            if not self._body.stream:
                return await sse.unless_gone(request.receive, self._whole())
            first = await sse.unless_gone(request.receive, anext(self._deltas))
        except sse.ClientGoneError:
            return Response(status_code=499)  # nobody reads it; access logs do
        finally:
            if not self._body.stream:
                await self._deltas.aclose()
        return sse.EventStream(self._frames(first))

    async def _whole(self) -> Response:
        choices: dict[int, Delta] = {}
        async for delta in self._deltas:
            self._watch.saw_token()
            _append(choices.setdefault(delta.index, Delta(delta.index)), delta)
        in_order = [choices[index] for index in sorted(choices)]
        content = msgspec.json.encode(self._dialect.whole(in_order, self._usage(), self._extra()))
        return Response(content, media_type="application/json")

    async def _frames(self, first: Delta) -> AsyncGenerator[bytes, None]:
        try:
            for data in self._delta_frames(first):
                yield data
            self._ttft.sent()
            async for delta in self._deltas:
                for data in self._delta_frames(delta):
                    yield data
            extra = self._extra()
            if self._wants_usage or extra is not msgspec.UNSET:
                usage = self._usage() if self._wants_usage else None
                yield sse.frame(self._dialect.last_chunk(usage, extra))
        except Exception as error:  # noqa: BLE001 - whatever broke, the client gets a frame it can read and an end
            yield sse.frame(to_api_error(error).body())
        finally:
            await self._deltas.aclose()
        yield sse.DONE

    def _delta_frames(self, delta: Delta) -> Iterator[bytes]:
        self._watch.saw_token()
        return map(sse.frame, self._dialect.chunks(delta))

    @property
    def _wants_usage(self) -> bool:
        options = self._body.stream_options
        return options is not None and bool(options.include_usage)

    def _usage(self) -> Usage:
        sequences = self._sequences.values()
        firsts = [sequence for sequence in sequences if sequence.index % self._body.n == 0]
        prompt = sum(len(sequence.prompt_token_ids) for sequence in firsts)
        completion = sum(sequence.num_tokens for sequence in sequences)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(sum(sequence.num_cached_tokens for sequence in firsts)),
        )

    def _extra(self) -> TightwireExtra | msgspec.UnsetType:
        wanted = self._body.tightwire
        if not (wanted.comm or wanted.timing or wanted.token_ids):
            return msgspec.UNSET
        return TightwireExtra(
            comm=self._watch.report() if wanted.comm else msgspec.UNSET,
            timing=self._ttft.timing if wanted.timing else msgspec.UNSET,
            token_ids=[s.token_ids for s in self._sequences.values()] if wanted.token_ids else msgspec.UNSET,
        )


def _append(choice: Delta, delta: Delta) -> None:
    choice.text += delta.text
    choice.entries += delta.entries
    choice.prompt_logprobs = delta.prompt_logprobs or choice.prompt_logprobs
    choice.finish_reason = delta.finish_reason
