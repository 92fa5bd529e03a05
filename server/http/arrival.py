"""When a request came: noted before anything else is done with it, where its first-token time begins."""

import time

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send


class Arrival:
    """ASGI middleware, to be the outermost. Headers have come by then; the body is still to be read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["arrived_s"] = time.monotonic()
        await self._app(scope, receive, send)


def arrived_s(request: Request) -> float:
    """On the clock of ``time.monotonic``."""
    return request.state.arrived_s
