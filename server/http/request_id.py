"""The outermost layer: every response carries X-Request-Id, and nothing unforeseen escapes without the envelope."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tightwire.server.api.errors import to_api_error

_log = logging.getLogger(__name__)
_HEADER = "X-Request-Id"
# What a client sends is echoed and logged, so it may hold nothing that means something to a log or a header.
_ACCEPTED = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestId:
    """ASGI middleware: echo the client's request id, or make one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        request_id = given if _ACCEPTED.fullmatch(given) else uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # it left while it was still sending its body
        except Exception as error:
            _log.error("request %s, %s %s, broke", request_id, scope["method"], scope["path"])
            answer = to_api_error(error)
            if started:
                raise  # half an answer is out: the server closes the connection, which the client can tell from an end
            await answer.response()(scope, receive, send_with_id)
