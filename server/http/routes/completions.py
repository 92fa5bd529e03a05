"""POST /v1/completions."""

import time

from fastapi import APIRouter, Request, Response

from tightwire.server.api.answer import Answer, make_heading
from tightwire.server.api.completions import CompletionDialect, completion_sequences
from tightwire.server.api.prompts import check_model
from tightwire.server.api.responses import Completion
from tightwire.server.api.schemas import CompletionBody
from tightwire.server.api.serving import Serving
from tightwire.server.api.ttft import TtftWatch
from tightwire.server.http.arrival import arrived_s
from tightwire.server.http.body import read_body
from tightwire.server.http.openapi import operation

_DOC = operation(Completion, chunk=Completion, body=CompletionBody, errors=(400, 404, 413, 415, 429, 503))


def completions_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=_DOC, summary="Continue one or several prompts")
    async def create(request: Request) -> Response:
        model = serving.require_ready()
        body = await read_body(request, CompletionBody, max_bytes=serving.http.max_body_bytes)
        check_model(body, model.info)
        tokenizing_s = time.monotonic()
        sequences = await completion_sequences(body, model, serving.http.max_queued_requests)
        ttft = TtftWatch(
            serving.metrics,
            arrived_s=arrived_s(request),
            tokenize_s=time.monotonic() - tokenizing_s,
            streamed=body.stream,
        )
        heading = make_heading("cmpl", model, body)
        dialect = CompletionDialect(body, heading, model.tokens)
        answer = Answer(serving, body, sequences, request_id=heading.id, dialect=dialect, ttft=ttft)
        return await answer.respond(request)

    return router
