"""Turns every error into the envelope that OpenAI clients read: ``{"error": {message, type, param, code}}``.

Routes raise ``ApiError``; the engine client raises its own exceptions (``_ENGINE_ERRORS``). An unexpected exception
becomes a 500 without details and a log record.
"""

import logging
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from tightwire.server.ipc.engine_client import (
    EngineUnavailableError,
    QueueFullError,
    RankSilentError,
    RecordingBusyError,
)

_log = logging.getLogger(__name__)

_ENGINE_ERRORS = (EngineUnavailableError, QueueFullError, RecordingBusyError, RankSilentError)

_RETRY_SOON = {"Retry-After": "1"}  # a place in the queue is free within seconds
_RETRY_LATER = {"Retry-After": "5"}  # loading or restarting takes longer

# OpenAI's ``type`` for a status; any other 4xx is an invalid_request_error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error response, and the error event of a broken stream."""

    error: ErrorDetail


class ApiError(Exception):
    """An error response; the client reads ``message``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body()),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is invalid."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """503: loading, draining or dead; the client may retry later."""
    return ApiError(503, message, code="unavailable", headers=_RETRY_LATER)


def to_api_error(error: Exception) -> ApiError:
    """The ``ApiError`` for any exception. Logs an unexpected one and hides its details from the client."""
    match error:
        case ApiError():
            return error
        case EngineUnavailableError():
            return unavailable(str(error))
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers=_RETRY_SOON)
        case RecordingBusyError():
            return ApiError(409, str(error), code="recording_busy", headers=_RETRY_SOON)
        case RankSilentError():
            return ApiError(504, str(error), code="rank_silent")
        case HTTPException():
            return _from_http_exception(error)
    _log.error("unexpected error while answering", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def _from_http_exception(error: HTTPException) -> ApiError:
    messages = {
        404: "there is no such route; GET /openapi.json lists the routes",
        405: "this route does not support this method; the Allow header lists the ones it supports",
    }
    message = messages.get(error.status_code, str(error.detail))
    codes = {404: "route_not_found", 405: "method_not_allowed"}
    return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    return to_api_error(error).response()


def install_error_handlers(app: FastAPI) -> None:
    """Answer expected errors in the envelope; ``http/middleware`` does the same for unexpected ones."""
    for kind in (ApiError, *_ENGINE_ERRORS, HTTPException):
        app.add_exception_handler(kind, _answer_error)
