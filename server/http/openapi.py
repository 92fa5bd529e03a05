"""Makes the OpenAPI page from ``OPERATIONS``, because FastAPI does not see the types of requests and responses."""

from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tightwire.server.api import request_bodies, response_bodies
from tightwire.server.api.chat import ChatChunk, ChatCompletion
from tightwire.server.api.completions import Completion
from tightwire.server.api.errors import ErrorBody, MessagesErrorBody
from tightwire.server.dialects import messages_answer, responses_answer
from tightwire.server.dialects.messages_answer import AnsweredMessage, TokenCount
from tightwire.server.dialects.messages_request import CountTokensBody, MessagesBody
from tightwire.server.dialects.responses_answer import ResponseBody
from tightwire.server.dialects.responses_request import ResponsesBody

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    403: "The server was not started for this; the message names the option.",
    404: "No such model, or no such route.",
    409: "Another client is recording collectives; Retry-After says when to try again.",
    413: "The body is larger than the server accepts.",
    415: "The body is not JSON by its Content-Type.",
    429: "The server's request limit is reached; Retry-After says when to try again.",
    500: "An unexpected error; the server's log has the details.",
    503: "The model is loading, the server is shutting down, or the engine died.",
    504: "A rank did not answer in time; the message names it.",
}
_PARSING = (400, 404, 413, 415, 503)


class Operation(NamedTuple):
    """The types of the answer by media type, of the request's body, of a stream's events, and of errors."""

    answer: dict[str, type[msgspec.Struct] | None]
    errors: tuple[int, ...] = ()
    body: type[request_bodies.Body] | None = None
    chunks: tuple[type[msgspec.Struct], ...] = ()
    error: type[msgspec.Struct] = ErrorBody


def _json(answer: type[msgspec.Struct], errors: tuple[int, ...], *types: Any) -> Operation:
    return Operation({"application/json": answer}, (401, 500, *errors), *types)


_HEALTH = Operation({"application/json": response_bodies.Health}, (503,), error=response_bodies.Health)
OPERATIONS = {
    "/": Operation({"application/json": response_bodies.Home, "text/html": None, "text/plain": None}, (401, 500)),
    "/v1/chat/completions": _json(ChatCompletion, (*_PARSING, 429), request_bodies.ChatBody, (ChatChunk,)),
    "/v1/completions": _json(Completion, (*_PARSING, 429), request_bodies.CompletionBody, (Completion,)),
    "/v1/responses": _json(ResponseBody, (*_PARSING, 429), ResponsesBody, responses_answer.EVENTS),
    "/v1/responses/input_tokens": _json(responses_answer.InputTokens, _PARSING, ResponsesBody),
    "/v1/messages": _json(AnsweredMessage, (*_PARSING, 429), MessagesBody, messages_answer.EVENTS, MessagesErrorBody),
    "/v1/messages/count_tokens": _json(TokenCount, _PARSING, CountTokensBody, (), MessagesErrorBody),
    "/v1/models": _json(response_bodies.ModelList, (503,)),
    "/v1/models/{model_id}": _json(response_bodies.ModelCard, (404, 503)),
    "/v1/load_lora_adapter": _json(response_bodies.ModelCard, (403, *_PARSING, 504), request_bodies.LoadAdapterBody),
    "/v1/unload_lora_adapter": _json(response_bodies.ModelDeleted, (403, *_PARSING), request_bodies.UnloadAdapterBody),
    "/tokenize": _json(response_bodies.Tokenized, _PARSING, request_bodies.TokenizeBody),
    "/detokenize": _json(response_bodies.Detokenized, _PARSING, request_bodies.DetokenizeBody),
    "/tokenizer_info": _json(response_bodies.TokenizerInfo, (503,)),
    "/version": _json(response_bodies.Version, ()),
    "/comm": _json(response_bodies.CommPolicy, (503,)),
    "/comm/trace": _json(response_bodies.ChromeTrace, (400, 409, 503, 504)),
    "/health/live": _HEALTH._replace(errors=()),
    "/health/ready": _HEALTH,
    "/health": _HEALTH,
    "/metrics": Operation({"text/plain": None}),
}


def make_page(app: FastAPI, closed: bool) -> dict[str, Any]:
    """The page of /openapi.json. ``closed``: an API key is required."""
    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    listed = OPERATIONS.values()
    bodies = [operation.body for operation in listed if operation.body is not None]
    kinds = (kind for own in listed for kind in (*own.answer.values(), *own.chunks, own.error))
    answers = dict.fromkeys(filter(None, kinds))
    _, requests = models_json_schema([(kind, "validation") for kind in bodies], ref_template=_REF)
    _, components = msgspec.json.schema_components(answers, ref_template=_REF.format(model="{name}"))
    page.setdefault("components", {})["schemas"] = {**requests.get("$defs", {}), **components}
    for path, methods in page["paths"].items():
        for method in methods.values():
            method |= _describe(OPERATIONS[path])
    if closed:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page


def _describe(operation: Operation) -> dict[str, Any]:
    content = {media: {"schema": _ref(kind)} if kind else {} for media, kind in operation.answer.items()}
    if operation.chunks:
        content["text/event-stream"] = {"schema": _event(operation)}
    described: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    error = {"application/json": {"schema": _ref(operation.error)}}
    for status in sorted(operation.errors):
        described[str(status)] = {"description": _ERRORS[status], "content": error}
    extra: dict[str, Any] = {"responses": described}
    if operation.body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(operation.body)}}}
    return extra


def _event(operation: Operation) -> dict[str, Any]:
    """A chunk, the error of a broken stream, or the end, which is not JSON."""
    kinds = {"anyOf": [_ref(kind) for kind in dict.fromkeys((*operation.chunks, operation.error))]}
    body = {"type": "string", "contentMediaType": "application/json", "contentSchema": kinds}
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, body]}}, "required": ["data"]}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}
