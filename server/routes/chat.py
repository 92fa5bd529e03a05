"""POST /v1/chat/completions."""

import time

from fastapi import APIRouter, Request, Response

from tightwire.server.answer import Answer, make_heading
from tightwire.server.arrival import arrived_s
from tightwire.server.body import read_body
from tightwire.server.chat import ChatDialect, chat_sequences
from tightwire.server.openapi import operation
from tightwire.server.prompts import check_model
from tightwire.server.responses import ChatChunk, ChatCompletion
from tightwire.server.schemas import ChatBody
from tightwire.server.serving import Serving
from tightwire.server.ttft import TtftWatch

_DOC = operation(ChatCompletion, chunk=ChatChunk, body=ChatBody, errors=(400, 404, 413, 415, 429, 503))


def chat_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_DOC, summary="Answer a conversation")
    async def create(request: Request) -> Response:
        model = serving.require_ready()
        body = await read_body(request, ChatBody, max_bytes=serving.http.max_body_bytes)
        check_model(body, model.info)
        tokenizing_s = time.monotonic()
        sequences = await chat_sequences(body, model, serving.http.max_queued_requests)
        ttft = TtftWatch(
            serving.metrics,
            arrived_s=arrived_s(request),
            tokenize_s=time.monotonic() - tokenizing_s,
            streamed=body.stream,
        )
        heading = make_heading("chatcmpl", model, body)
        dialect = ChatDialect(body, heading, model.tokens)
        answer = Answer(serving, body, sequences, request_id=heading.id, dialect=dialect, ttft=ttft)
        return await answer.respond(request)

    return router
