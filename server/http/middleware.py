"""The ASGI middleware: the API key, the request id and record, and unexpected errors in the envelope."""

import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tightwire.server.api.errors import ApiError, to_api_error
from tightwire.server.api.metrics import Metrics
from tightwire.server.api.trace import Recorder, RequestRecord, Tokens
from tightwire.server.http.keys import KeyRing

_log = logging.getLogger(__name__)
_HEADER = "X-Request-Id"
_IGNORED_HEADER = "X-Tightwire-Ignored"
_ANTHROPIC_HEADER = "request-id"  # which Anthropic's clients read
EXPOSED_HEADERS = (_HEADER, _ANTHROPIC_HEADER, _IGNORED_HEADER, "Retry-After")  # to pages of other origins
_MAX_IGNORED = 20  # fields named in the header
# A client's id is echoed and logged, so it must not contain anything with a meaning in a header or a log.
_ACCEPTED = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Probes and scrapers have no keys, and the pages ask for one. A route that is added later is closed unless it is listed here.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/dashboard"})
_PAGE_FILES = "/web/"


class RequestScope:
    """ASGI middleware: sets ``request.state.record``, and the headers with the request id and the ignored fields.

    It answers HEAD as GET; the server leaves out the body. ``recorders``: receive each record when its response has ended.
    """

    def __init__(self, app: ASGIApp, recorders: Sequence[Recorder] = ()) -> None:
        self._app, self._recorders = app, recorders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(_HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(id=request_id, method=scope["method"], path=scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[_HEADER] = request_id
                if scope["path"].startswith("/v1/messages"):
                    headers[_ANTHROPIC_HEADER] = request_id
                if ignored := scope["state"].get("ignored_fields"):
                    # Without characters that have a meaning in a header.
                    shown = [re.sub(r"[^A-Za-z0-9._\[\]-]", "?", field[:80]) or "?" for field in ignored[:_MAX_IGNORED]]
                    headers[_IGNORED_HEADER] = ", ".join(shown + ["..."] * (len(ignored) > _MAX_IGNORED))
            await send(message)

        try:
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, receive, send_with_id)
        except ClientDisconnect:
            record.status = 499  # it disconnected while sending its body
        except Exception as error:
            _log.error("request %s, %s %s, failed", request_id, scope["method"], scope["path"])
            answer = to_api_error(error)
            if record.status is not None:
                raise  # the server then closes the connection, so the client does not take half a response for a whole
            await answer.response(scope["path"])(scope, receive, send_with_id)
        finally:
            record.ended_s = time.monotonic()
            if not _is_public(scope):
                self._report(record, scope)
            record.count_tokens = Tokens  # else record and answer hold each other until a full garbage collection

    def _report(self, record: RequestRecord, scope: Scope) -> None:
        for recorder in self._recorders:
            try:
                recorder(record, Headers(scope=scope))
            except Exception:  # noqa: BLE001 - a full disk must not break answers
                _log.exception("request %s could not be recorded", record.id)


def wants_page(headers: Headers) -> bool:
    """True for a browser, which gets the page at / in place of JSON."""
    return "text/html" in headers.get("accept", "")


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return wants_page(Headers(scope=scope))  # without the model's name, which the JSON has
    return path in PUBLIC_PATHS or path.startswith(_PAGE_FILES)


class RequireKey:
    """ASGI middleware: 401 unless ``Authorization: Bearer KEY`` or ``x-api-key: KEY`` has a key of the server; 429 at its limits."""

    def __init__(self, app: ASGIApp, keys: KeyRing, metrics: Metrics) -> None:
        self._app, self._keys, self._metrics = app, keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_public(scope):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        header = headers.get("authorization", "")
        if not header and "x-api-key" in headers:  # as Anthropic's clients send it
            header = f"Bearer {headers['x-api-key']}"
        scheme, _, given = header.partition(" ")
        key = self._keys.find(given.strip().encode("latin-1"))  # the bytes as they came
        if scheme.lower() != "bearer" or key is None:
            how = "wrong" if header else "missing"
            message = f"the API key is {how}; send Authorization: Bearer KEY or x-api-key: KEY, a key of this server"
            refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            return await refusal.response(scope["path"])(scope, receive, send)
        record: RequestRecord = scope["state"]["record"]
        record.key = key.name
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        try:
            self._keys.begin(key)
        except ApiError as error:
            self._metrics.key_requests.labels(key.name, "refused").inc()
            return await error.response(scope["path"])(scope, receive, send)
        self._metrics.key_requests.labels(key.name, "accepted").inc()
        try:
            await self._app(scope, receive, send)
        finally:
            tokens = record.count_tokens()
            self._keys.end(key, sum(tokens))
            for kind, count in tokens._asdict().items():
                self._metrics.key_tokens.labels(key.name, kind).inc(count)
