"""Turns every error into the envelope that the route's clients read.

OpenAI's is ``{"error": {message, type, param, code}}``. Anthropic's, under /v1/messages, is ``{"type": "error", "error": {...}}``.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from tightwire.option import suggest
from tightwire.server.ipc import engine_client

_log = logging.getLogger(__name__)

_RETRY_SOON = {"Retry-After": "1"}  # a place in the queue is free within seconds
_RETRY_LATER = {"Retry-After": "5"}  # loading or restarting takes longer

# Status, code and headers of the engine client's errors.
_ENGINE_ERRORS: dict[type[Exception], tuple[int, str, dict[str, str] | None]] = {
    engine_client.EngineUnavailableError: (503, "unavailable", _RETRY_LATER),
    engine_client.QueueFullError: (429, "queue_full", _RETRY_SOON),
    engine_client.RecordingBusyError: (409, "recording_busy", _RETRY_SOON),
    engine_client.RankSilentError: (504, "rank_silent", None),
    engine_client.AdapterRefusedError: (400, "adapter_refused", None),
}
_NO_ROUTE = "route_not_found"
# Code and message for statuses of Starlette's router.
_ROUTER_ERRORS = {
    404: (_NO_ROUTE, "there is no such route"),
    405: ("method_not_allowed", "this route does not support this method; the Allow header lists the ones it supports"),
}

# OpenAI's and Anthropic's ``type`` for a status; other statuses have those of 400 or 500.
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    409: ("conflict_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("service_unavailable_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


def json_response(body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error response, and the error event of a broken stream."""

    error: ErrorDetail


class MessagesErrorBody(ErrorBody, frozen=True, tag_field="type", tag="error"):
    """The same under /v1/messages, in Anthropic's form."""


@dataclass(eq=False)
class ApiError(Exception):
    """An error response; the client reads ``message``."""

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def body(self, kind: type[ErrorBody] = ErrorBody) -> ErrorBody:
        types = _TYPES.get(self.status, _TYPES[400 if self.status < 500 else 500])
        messages = kind is MessagesErrorBody
        # Anthropic's clients read this code, and then send the whole conversation and no thread.
        details = {"error_code": "thread_unsupported_request"} if messages and self.param == "thread" else msgspec.UNSET
        return kind(ErrorDetail(self.message, types[messages], self.param, self.code, details))

    def response(self, path: str) -> Response:
        """``path``: the path of the request, which decides the form of the body."""
        kind = MessagesErrorBody if path.startswith("/v1/messages") else ErrorBody
        return json_response(self.body(kind), self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """503: loading, draining or dead; the client may retry later."""
    return ApiError(503, message, code="unavailable", headers=_RETRY_LATER)


def to_api_error(error: Exception) -> ApiError:
    """The ``ApiError`` for any exception. Logs an unexpected one and hides its details from the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        code, message = _ROUTER_ERRORS.get(error.status_code, (None, str(error.detail)))
        return ApiError(error.status_code, message, code=code, headers=error.headers)
    if type(error) in _ENGINE_ERRORS:
        status, code, headers = _ENGINE_ERRORS[type(error)]
        return ApiError(status, str(error), code=code, headers=headers)
    _log.error("unexpected error while answering", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


async def _answer_error(request: Request, error: Exception) -> Response:
    answer, path = to_api_error(error), request.url.path
    if answer.code == _NO_ROUTE:
        answer.message += _near_route(path, request.app.openapi()["paths"])
    return answer.response(path)


def _near_route(path: str, known: Collection[str]) -> str:
    """The end of a message about a path without a route: the one that was probably meant."""
    bare = path.rstrip("/")
    if bare in known:
        return f"; leave out the slash at the end: {bare}"
    if f"/v1{bare}" in known:
        return f"; did you mean /v1{bare}? The base URL of OpenAI's clients ends in /v1"
    if bare.startswith("/v1/") and bare[3:] in known:
        return f"; did you mean {bare[3:]}? Leave /v1 out of the base URL"
    own = [route for route in known if route.startswith("/v1/")]
    otherwise = f"; this server has {', '.join(own)}, and others that GET /openapi.json lists"
    return suggest(path[:200], own if path.startswith("/v1/") else known, otherwise)


def install_error_handlers(app: FastAPI) -> None:
    """Answer expected errors in the envelope; ``http/middleware`` does the same for unexpected ones."""
    for kind in (ApiError, *_ENGINE_ERRORS, HTTPException):
        app.add_exception_handler(kind, _answer_error)
