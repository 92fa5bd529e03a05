"""GET /health, /health/live, /health/ready, /metrics, /comm and /comm/trace."""

import asyncio
import time
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from tightwire.comm.ledger.counters import Latency
from tightwire.comm.ledger.recording import chrome_trace
from tightwire.server.api.errors import invalid
from tightwire.server.api.responses import ChromeTrace, CommCost, CommPolicy, Health
from tightwire.server.api.serving import ModelInfo, Serving
from tightwire.server.http.openapi import operation
from tightwire.server.ipc.engine_client import EngineClient, Phase
from tightwire.server.ipc.engine_stats import CommCount

_TRACE_DEFAULT_S = 2.0
_TRACE_MAX_S = 30.0

_LIVE_DOC = {"responses": {"200": operation(Health, errors=())["responses"]["200"]}}
_READY_DOC = {"responses": _LIVE_DOC["responses"] | {"503": _LIVE_DOC["responses"]["200"]}}
_METRICS_DOC = {"responses": {"200": {"description": "The metrics.", "content": {"text/plain": {}}}}}
_TRACE_DOC = operation(ChromeTrace, errors=(400, 409, 503, 504)) | {
    "parameters": [
        {
            "name": "seconds",
            "in": "query",
            "description": "how long to record",
            "schema": {"type": "number", "default": _TRACE_DEFAULT_S, "exclusiveMinimum": 0, "maximum": _TRACE_MAX_S},
        }
    ]
}


def observe_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.get("/health/live", openapi_extra=_LIVE_DOC, summary="200 while the process answers")
    async def live() -> Response:
        return _health(200, Health(status="live"))

    @router.get("/health/ready", openapi_extra=_READY_DOC, summary="200 when the server takes requests")
    @router.get("/health", openapi_extra=_READY_DOC, summary="Same as /health/ready")
    async def ready() -> Response:
        status = serving.status
        health = Health(status=str(status.phase), reason=status.reason)
        if (model := serving.holder.model) is not None:
            health.kernels, health.activations = model.info.kernels, model.info.activations
        return _health(200 if status.phase is Phase.READY else 503, health)

    @router.get("/metrics", openapi_extra=_METRICS_DOC, summary="For Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        page, content_type = serving.metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    @router.get(
        "/comm",
        openapi_extra=operation(CommPolicy, errors=(503,)),
        summary="AllReduce policies, their reasons, and measured cost",
    )
    async def comm() -> Response:
        answer = _comm_policy(serving.require_model().info, serving.engine)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.get(
        "/comm/trace",
        openapi_extra=_TRACE_DOC,
        summary="Record every collective of all ranks for some seconds; open the answer in ui.perfetto.dev",
    )
    async def trace(request: Request) -> Response:
        if unknown := sorted(set(request.query_params) - {"seconds"}):
            given = unknown[0][:40]
            raise invalid(
                f"unknown query parameter {given!r}; seconds is the only one", given, code="unknown_parameter"
            )
        seconds = _trace_seconds(request.query_params.getlist("seconds"))
        ranks = await serving.engine.record_collectives(seconds)
        # Half a minute of several ranks takes a second to encode; other requests' tokens do not wait for it.
        page = await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(ranks)))
        name = f'attachment; filename="tightwire-collectives-{int(time.time())}.json"'
        return Response(page, media_type="application/json", headers={"content-disposition": name})

    return router


def _trace_seconds(given: Sequence[str]) -> float:
    """Raises ApiError 400 for a value that is not a number or out of range."""
    try:
        seconds = float(given[-1]) if given else _TRACE_DEFAULT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _TRACE_MAX_S:  # false for NaN too
        raise invalid(f"seconds must be more than 0 and at most {_TRACE_MAX_S:g}, got {given[-1]!r}", "seconds")
    return seconds


def _comm_policy(info: ModelInfo, engine: EngineClient) -> CommPolicy:
    stats, setup = engine.stats, engine.comm_setup
    counts = stats.comm if stats else []
    quantiles = {latency[:3]: latency for latency in engine.comm_latencies}
    bytes_sent, exact_bytes = sum(count.bytes_sent for count in counts), sum(count.exact_bytes for count in counts)
    return CommPolicy(
        algorithm=info.allreduce,
        transport=setup.transport if setup else info.transport,
        transport_reason=setup.transport_reason if setup else "",
        tp=info.tp,
        dp=info.dp,
        replicas=stats.loads if stats and len(stats.loads) > 1 else [],
        num_nodes=setup.num_nodes if setup else 1,
        overlap=setup.overlap if setup else False,
        choices=setup.choices if setup else [],
        extra=setup.extra if setup else {},
        self_test=setup.self_test if setup else [],
        link=setup.link if setup else None,
        num_steps=stats.counters.num_steps if stats else 0,
        bytes_sent=bytes_sent,
        exact_bytes=exact_bytes,
        saved_bytes=exact_bytes - bytes_sent,
        counters=[_cost(count, quantiles.get((count.op, count.algorithm, count.phase))) for count in counts],
    )


def _cost(count: CommCount, latency: Latency | None) -> CommCost:
    return CommCost(
        *msgspec.structs.astuple(count),
        mean_us=count.seconds / count.calls * 1e6 if count.calls else None,
        p50_us=latency.p50_us if latency else None,
        p99_us=latency.p99_us if latency else None,
        algbw_gb_per_s=count.message_bytes / count.seconds / 1e9 if count.seconds else None,
    )


def _health(status: int, health: Health) -> Response:
    return Response(msgspec.json.encode(health), status_code=status, media_type="application/json")
