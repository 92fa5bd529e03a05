"""Every error a client can see, in the one shape OpenAI clients read: ``{"error": {message, type, param, code}}``.

A route raises ``ApiError`` (or one of the seam's own exceptions); the handlers here turn whatever was raised into a
response. Knows nothing of what went wrong inside: an unforeseen exception becomes a plain 500 and a log record.
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

_BUSY_RETRY_S = 1  # a queue moves within seconds
_UNAVAILABLE_RETRY_S = 5  # loading or restarting takes longer

# OpenAI's ``type`` for a status; whatever is not listed is the request's own fault.
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
    """What every error response carries, and the error frame of a broken stream."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer other than success; ``message`` is for the client's eyes."""

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
    """400: the request cannot be served as it stands."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """503: loading, draining or dead; worth another try later."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(_UNAVAILABLE_RETRY_S)})


def too_busy(message: str) -> ApiError:
    """429: as many requests wait as the server accepts."""
    return ApiError(429, message, code="queue_full", headers={"Retry-After": str(_BUSY_RETRY_S)})


def to_api_error(error: Exception) -> ApiError:
    """The client's view of any exception; what is nobody's declared fault is logged here and stays inside."""
    match error:
        case ApiError():
            return error
        case EngineUnavailableError():
            return unavailable(str(error))
        case QueueFullError():
            return too_busy(str(error))
        case RecordingBusyError():
            return ApiError(409, str(error), code="recording_busy", headers={"Retry-After": str(_BUSY_RETRY_S)})
        case RankSilentError():
            return ApiError(504, str(error), code="rank_silent")
        case HTTPException():
            return _from_http_exception(error)
    _log.error("unforeseen error while answering", exc_info=error)
    return ApiError(500, "the server made a mistake; its log says more", code="internal_error")


def _from_http_exception(error: HTTPException) -> ApiError:
    messages = {
        404: "there is no such route; GET /openapi.json lists them",
        405: "this route exists, but not with this method; the Allow header lists the methods it has",
    }
    message = messages.get(error.status_code, str(error.detail))
    codes = {404: "route_not_found", 405: "method_not_allowed"}
    return ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    return to_api_error(error).response()


def install_error_handlers(app: FastAPI) -> None:
    """Answer all declared errors in the envelope; the outermost middleware does it for the undeclared."""
    seams_own = (EngineUnavailableError, QueueFullError, RecordingBusyError, RankSilentError)
    for kind in (ApiError, *seams_own, HTTPException):
        app.add_exception_handler(kind, _answer_error)
