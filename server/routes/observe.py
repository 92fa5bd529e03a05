"""GET /health, /health/live, /health/ready, /metrics and /comm: how the server is doing."""

import msgspec
from fastapi import APIRouter, Request, Response

from tightwire.server.engine_client import Phase
from tightwire.server.openapi import operation
from tightwire.server.responses import CommPolicy, CommTotals, Health
from tightwire.server.serving import Serving

_LIVE_DOC = {"responses": {"200": operation(Health, errors=())["responses"]["200"]}}
_READY_DOC = {"responses": _LIVE_DOC["responses"] | {"503": _LIVE_DOC["responses"]["200"]}}
_METRICS_DOC = {"responses": {"200": {"description": "The metrics.", "content": {"text/plain": {}}}}}


def observe_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.get("/health/live", openapi_extra=_LIVE_DOC, summary="200 while the process answers")
    async def live() -> Response:
        return _health(200, Health(status="live"))

    @router.get("/health/ready", openapi_extra=_READY_DOC, summary="200 when a request would be answered")
    @router.get("/health", openapi_extra=_READY_DOC, summary="The same as /health/ready")
    async def ready() -> Response:
        status = serving.status
        health = Health(status=str(status.phase), reason=status.reason)
        return _health(200 if status.phase is Phase.READY else 503, health)

    @router.get("/metrics", openapi_extra=_METRICS_DOC, summary="For Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        page, content_type = serving.metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    @router.get(
        "/comm", openapi_extra=operation(CommPolicy, errors=(503,)), summary="Algorithm in use, and what was exchanged"
    )
    async def comm() -> Response:
        info = serving.require_model().info
        stats = serving.engine.stats
        counters = [CommTotals(*msgspec.structs.astuple(count)) for count in stats.comm] if stats else []
        answer = CommPolicy(
            algorithm=info.allreduce,
            transport=info.transport,
            tp=info.tp,
            num_steps=stats.num_steps if stats else 0,
            counters=counters,
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router


def _health(status: int, health: Health) -> Response:
    return Response(msgspec.json.encode(health), status_code=status, media_type="application/json")
