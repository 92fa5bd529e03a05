"""Makes the OpenAPI page from the classes that check requests and encode responses.

FastAPI does not see these types, because ``body`` reads requests and msgspec encodes responses; ``operation`` states them.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tightwire.server.api import responses
from tightwire.server.api.chat import ChatChunk, ChatCompletion
from tightwire.server.api.completions import Completion
from tightwire.server.api.errors import ErrorBody
from tightwire.server.api.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, DetokenizeBody, TokenizeBody)
_ANSWERS: tuple[type[msgspec.Struct], ...] = (
    ErrorBody,
    ChatCompletion,
    ChatChunk,
    Completion,
    responses.ModelList,
    responses.ModelCard,
    responses.Tokenized,
    responses.Detokenized,
    responses.Health,
    responses.CommPolicy,
    responses.ChromeTrace,
)
_ERRORS = {
    400: "The request is invalid; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "No such model, or no such route.",
    409: "Another client is recording collectives; Retry-After says when to try again.",
    413: "The body is larger than the server accepts.",
    415: "The body is not JSON by its Content-Type.",
    429: "The server's request limit is reached; Retry-After says when to try again.",
    500: "An unexpected error; the server's log has the details.",
    503: "The model is loading, the server is shutting down, or the engine died.",
    504: "A rank did not answer in time; the message names it.",
}


def operation(
    answer: type[msgspec.Struct],
    *,
    errors: tuple[int, ...],
    body: type[Body] | None = None,
    chunk: type[msgspec.Struct] | None = None,
) -> dict[str, Any]:
    """``openapi_extra`` of one route. ``chunk``: the type of each event of its stream."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event(chunk)}
    described: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in sorted({401, 500, *errors}):
        error_content = {"application/json": {"schema": _ref(ErrorBody)}}
        described[str(status)] = {"description": _ERRORS[status], "content": error_content}
    extra: dict[str, Any] = {"responses": described}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return extra


def make_openapi(app: FastAPI, *, closed: bool) -> Callable[[], dict[str, Any]]:
    """The function that FastAPI calls for /openapi.json. ``closed``: an API key is required."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _page(app, closed)
        return app.openapi_schema

    return openapi


def _page(app: FastAPI, closed: bool) -> dict[str, Any]:
    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, requests = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_REF)
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REF.replace("{model}", "{name}"))
    components = page.setdefault("components", {})
    components["schemas"] = {**requests.get("$defs", {}), **answers}
    for path in page["paths"].values():
        for method in path.values():
            method["responses"].pop("422", None)  # of FastAPI's validation, which no route uses
    if closed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page


def _event(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    """A chunk, the ErrorBody of a broken stream, or the end, which is not JSON."""
    body = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref(ErrorBody)]},
    }
    return {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, body]}}, "required": ["data"]}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(model=kind.__name__)}
