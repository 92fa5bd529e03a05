"""The ASGI middleware: the API key, the request id, the arrival time, and unexpected errors in the envelope."""

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tightwire.server.api.errors import ApiError, to_api_error

_log = logging.getLogger(__name__)
_HEADER = "X-Request-Id"
_IGNORED_HEADER = "X-Tightwire-Ignored"
_MAX_IGNORED = 20  # fields named in the header
# A client's id is echoed and logged, so it must not contain anything with a meaning in a header or a log.
_ACCEPTED = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
# Probes and scrapers have no keys, and the pages ask for one. A route that is added later is closed unless it is listed here.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/dashboard"})
_PAGE_FILES = "/web/"


class RequestScope:
    """ASGI middleware: sets ``request.state.arrived_s``, and the headers with the request id and the ignored fields.

    It answers HEAD as GET; the server leaves out the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["arrived_s"] = time.monotonic()
        given = Headers(scope=scope).get(_HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers[_HEADER] = request_id
                if ignored := scope["state"].get("ignored_fields"):
                    headers[_IGNORED_HEADER] = _header_list(ignored)
            await send(message)

        try:
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(asked, receive, send_with_id)
        except ClientDisconnect:
            return  # it disconnected while sending its body
        except Exception as error:
            _log.error("request %s, %s %s, failed", request_id, scope["method"], scope["path"])
            answer = to_api_error(error)
            if started:
                raise  # the server then closes the connection, so the client does not take half a response for a whole
            await answer.response()(scope, receive, send_with_id)


def wants_page(headers: Headers) -> bool:
    """True for a browser, which gets the page at / in place of JSON."""
    return "text/html" in headers.get("accept", "")


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return wants_page(Headers(scope=scope))  # without the model's name, which the JSON has
    return path in PUBLIC_PATHS or path.startswith(_PAGE_FILES)


class RequireKey:
    """ASGI middleware: 401 unless ``Authorization: Bearer KEY`` has the server's key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._app
        if scope["type"] == "http" and not _is_public(scope):
            header = Headers(scope=scope).get("authorization", "")
            scheme, _, key = header.partition(" ")
            # Digests have equal lengths, so the time of the comparison reveals nothing about the key, not even its length.
            given = hashlib.sha256(key.strip().encode("latin-1")).digest()  # the bytes as they came
            if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._digest):
                message = (
                    f"the API key is {'wrong' if header else 'missing'}; send the header Authorization: Bearer KEY with the "
                    "key the server was started with"
                )
                headers = {"WWW-Authenticate": "Bearer"}
                respond = ApiError(401, message, code="invalid_api_key", headers=headers).response()
        await respond(scope, receive, send)


def _header_list(fields: Sequence[str]) -> str:
    """The first fields, without characters that have a meaning in a header."""
    shown = [re.sub(r"[^A-Za-z0-9._\[\]-]", "?", field[:80]) or "?" for field in fields[:_MAX_IGNORED]]
    return ", ".join(shown + ["..."] * (len(fields) > _MAX_IGNORED))
