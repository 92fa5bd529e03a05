"""Requires the API key on every route except the public ones listed here."""

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tightwire.server.api.errors import ApiError

# Probes and scrapers have no keys. A route that is added later is closed unless it is listed here.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})


class RequireKey:
    """ASGI middleware: 401 unless ``Authorization: Bearer KEY`` has the server's key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            refusal = self._refusal(Headers(scope=scope).get("authorization"))
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, header: str | None) -> ApiError | None:
        scheme, _, key = (header or "").partition(" ")
        # Digests have equal lengths, so the time of the comparison reveals nothing about the key, not even its length.
        given = _digest(key.strip().encode("latin-1"))  # the bytes as they came
        if scheme.lower() == "bearer" and hmac.compare_digest(given, self._digest):
            return None
        problem = "the API key is missing" if header is None else "the API key is wrong"
        return ApiError(
            401,
            f"{problem}; send the header Authorization: Bearer KEY with the key the server was started with",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
