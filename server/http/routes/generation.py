"""POST /v1/chat/completions and POST /v1/completions."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from tightwire.server.api.answer import Answer, Dialect, Heading, make_heading
from tightwire.server.api.chat import ChatChunk, ChatCompletion, ChatDialect, chat_sequences
from tightwire.server.api.completions import Completion, CompletionDialect, completion_sequences
from tightwire.server.api.detokenize import TokenTable
from tightwire.server.api.generation import Sequence
from tightwire.server.api.prompts import check_model
from tightwire.server.api.schemas import ChatBody, CompletionBody, GenerationBody
from tightwire.server.api.serving import ServedModel, Serving
from tightwire.server.api.trace import RequestTrace
from tightwire.server.http.body import read_body
from tightwire.server.http.middleware import arrived_s
from tightwire.server.http.openapi import operation

BodyT = TypeVar("BodyT", bound=GenerationBody)

_ERRORS = (400, 404, 413, 415, 429, 503)
_CHAT_DOC = operation(ChatCompletion, chunk=ChatChunk, body=ChatBody, errors=_ERRORS)
_COMPLETION_DOC = operation(Completion, chunk=Completion, body=CompletionBody, errors=_ERRORS)


def generation_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_CHAT_DOC, summary="Answer a conversation")
    async def chat(request: Request) -> Response:
        return await _answer(request, serving, ChatBody, "chatcmpl", chat_sequences, ChatDialect)

    @router.post("/v1/completions", openapi_extra=_COMPLETION_DOC, summary="Continue one or several prompts")
    async def completions(request: Request) -> Response:
        return await _answer(request, serving, CompletionBody, "cmpl", completion_sequences, CompletionDialect)

    return router


async def _answer(
    request: Request,
    serving: Serving,
    kind: type[BodyT],
    id_prefix: str,
    make_sequences: Callable[[BodyT, ServedModel, int], Awaitable[list[Sequence]]],
    make_dialect: Callable[[BodyT, Heading, TokenTable], Dialect],
) -> Response:
    model = serving.require_ready()
    body = await read_body(request, kind)
    check_model(body, model.info)
    trace = RequestTrace(serving.engine, serving.metrics, arrived_s=arrived_s(request), streamed=body.stream)
    with trace.tokenizing():
        sequences = await make_sequences(body, model, serving.http.max_queued_requests)
    heading = make_heading(id_prefix, model, body)
    dialect = make_dialect(body, heading, model.tokens)
    return await Answer(serving, body, sequences, dialect, trace, heading["id"]).respond(request)
