"""POST /v1/chat/completions and POST /v1/completions."""

from typing import Any

from fastapi import APIRouter, Request, Response

from tightwire.server.api.answer import Answer, Dialect
from tightwire.server.api.chat import ChatDialect
from tightwire.server.api.completions import CompletionDialect
from tightwire.server.api.prompts import check_model, check_options, make_sequences, run_off_loop
from tightwire.server.api.serving import Serving
from tightwire.server.api.trace import RequestTrace
from tightwire.server.http.body import read_body
from tightwire.server.http.middleware import arrived_s


def generation_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat(request: Request) -> Response:
        return await _answer(request, serving, ChatDialect)

    @router.post("/v1/completions", summary="Continue one or several prompts")
    async def completions(request: Request) -> Response:
        return await _answer(request, serving, CompletionDialect)

    return router


async def _answer(request: Request, serving: Serving, dialect_type: type[Dialect[Any]]) -> Response:
    model = serving.require_ready()
    body = await read_body(request, dialect_type.body_type, serving)
    check_model(body, model.info)
    check_options(body, model.info, serving.http.max_queued_requests)
    trace = RequestTrace(serving.engine, serving.metrics, arrived_s=arrived_s(request), streamed=body.stream)
    dialect = dialect_type(body, model)
    with trace.tokenizing():
        prompts = await dialect.prompts()
        sequences = await run_off_loop(lambda: make_sequences(body, model, prompts), sum(map(len, body.bad_words)))
    return await Answer(serving, dialect, sequences, trace).respond(request)
