"""GET /, /version, /health, /health/live, /health/ready, /metrics, /comm and /comm/trace."""

import asyncio
import html
import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from msgspec import UNSET
from msgspec.structs import asdict

from tightwire import __version__
from tightwire.comm.ledger.ledger import Count, Latency
from tightwire.comm.ledger.recording import chrome_trace
from tightwire.server.api.answer import cancel_on_disconnect
from tightwire.server.api.errors import invalid, json_response
from tightwire.server.api.response_bodies import CommCost, CommPolicy, Health, Home, Version
from tightwire.server.api.serving import ModelInfo, ServedModel, Serving
from tightwire.server.config.http import HttpOptions
from tightwire.server.http.middleware import wants_page
from tightwire.server.http.routes.pages import file_response
from tightwire.server.ipc.engine_client import EngineClient, Phase
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import CommSetup

_TRACE_DEFAULT_S = 2.0
_TRACE_MAX_S = 30.0
_SECONDS = {"type": "number", "default": _TRACE_DEFAULT_S, "exclusiveMinimum": 0, "maximum": _TRACE_MAX_S}
_TRACE_SECONDS = {"name": "seconds", "in": "query", "description": "how long to record", "schema": _SECONDS}
_LINKS = {
    "/": "a playground, in a browser",
    "/dashboard": "load, latencies and communication, in a browser",
    "/docs": "every route",
    "/openapi.json": "every route and field, for programs",
    "/health": "whether it takes requests",
    "/metrics": "counters and latencies, for Prometheus",
    "/comm": "which AllReduces run, why, and what they cost",
}


def observe_router(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.get("/", summary="What this server is, and where to go on")
    async def home(request: Request) -> Response:
        response = _home_response(request, serving)
        response.headers["vary"] = "accept, user-agent"
        return response

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return _as_table(request.app.openapi())

    @router.get("/health/live", summary="200 while the process answers")
    async def live() -> Response:
        return json_response(Health(status="live"))

    @router.get("/health/ready", summary="200 when the server takes requests")
    @router.get("/health", summary="Same as /health/ready")
    async def ready() -> Response:
        status = serving.status
        health = Health(status=str(status.phase), reason=status.reason)
        if (model := serving.holder.model) is not None:
            health.kernels, health.activations = model.info.kernels, model.info.plan.activations
            health.adapters = list(model.info.adapters.by_name) or UNSET
        return json_response(health, 200 if status.phase is Phase.READY else 503)

    @router.get("/version", summary="The version of Tightwire")
    async def version() -> Response:
        return json_response(Version(__version__))

    @router.get("/metrics", summary="For Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        page, content_type = serving.metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    @router.get("/comm", summary="AllReduce policies, their reasons, and measured cost")
    async def comm() -> Response:
        return json_response(_comm_policy(serving.require_model(Phase.DRAINING).info, serving.engine))

    @router.get(
        "/comm/trace",
        openapi_extra={"parameters": [_TRACE_SECONDS]},
        summary="Record every collective of all ranks for some seconds; open the answer in ui.perfetto.dev",
    )
    async def trace(request: Request) -> Response:
        ranks = await cancel_on_disconnect(request.receive, serving.engine.record_collectives(_trace_seconds(request)))
        # Half a minute of several ranks takes a second to encode; other requests' tokens do not wait for it.
        page = await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(ranks)))
        name = f'attachment; filename="tightwire-collectives-{int(time.time())}.json"'
        return Response(page, media_type="application/json", headers={"content-disposition": name})

    return router


def first_request(url: str, http: HttpOptions, model: ServedModel | None) -> str:
    """A command to try. ``url``: without a slash at its end."""
    key = " -H 'authorization: Bearer KEY'" if http.needs_key else ""
    socket = f" --unix-socket {shlex.quote(http.uds)}" if http.uds is not None else ""
    path, body = "completions", {"prompt": "A wire is"}
    if model is None or model.tokenizer.chat_template is not None:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    data = json.dumps({**body, "temperature": 0, "max_tokens": 60})
    return f"curl{socket} {shlex.quote(f'{url}/v1/{path}')} -H 'content-type: application/json'{key} -d '{data}'"


def _home_response(request: Request, serving: Serving) -> Response:
    """The playground for browsers, text for curl, JSON for all others and for who asks for it."""
    if wants_page(request.headers):
        return file_response(request, "index.html")
    url, model, status = str(request.base_url), serving.holder.model, serving.status
    example = first_request(url.rstrip("/"), serving.http, model)
    if status.phase is Phase.READY and status.reason:  # another node takes the requests
        example = f"curl {shlex.quote(url + 'health')}"
    home = Home(
        name=f"Tightwire {__version__}",
        about="Serves a dense model, split over several processes or devices, with OpenAI's HTTP API.",
        model=model.info.name if model else None,
        status=str(status),
        links=_LINKS,
        example=example,
    )
    is_curl = request.headers.get("user-agent", "").startswith("curl/") and request.headers.get("accept") == "*/*"
    return PlainTextResponse(_as_text(home)) if is_curl else json_response(home)


def _as_text(home: Home) -> str:
    width = max(map(len, home.links))
    links = "".join(f"  {path:{width}}  {text}\n" for path, text in home.links.items())
    return f"{home.name}. {home.about}\n{home.model or 'No model yet'}: {home.status}.\n\n{links}\n{home.example}\n"


def _as_table(page: Mapping[str, Any]) -> Response:
    """The routes of an OpenAPI page; it needs no script and no other server."""
    rows = "".join(
        f"<tr><td>{method.upper()}<td><code>{path}</code><td>{html.escape(operation['summary'])}"
        for path, methods in page["paths"].items()
        for method, operation in methods.items()
    )
    title = f"{page['info']['title']} {page['info']['version']}"
    return HTMLResponse(
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width"><meta name=color-scheme '
        f'content="light dark"><link rel=icon href="/web/icon.svg"><title>{title}</title><h1>{title}</h1>'
        f"<p>{html.escape(page['info']['description'])}<table>{rows}</table>"
        '<p>Fields, answers and errors: <a href="/openapi.json">/openapi.json</a>, which OpenAPI tools read.'
    )


def _trace_seconds(request: Request) -> float:
    """Raises ApiError 400 for other query parameters, and for a value that is not a number or out of range."""
    if unknown := sorted(set(request.query_params) - {"seconds"}):
        name = unknown[0][:40]
        raise invalid(f"unknown query parameter {name!r}; seconds is the only one", name, code="unknown_parameter")
    given = request.query_params.get("seconds", str(_TRACE_DEFAULT_S))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _TRACE_MAX_S:  # false for NaN too
        raise invalid(f"seconds must be more than 0 and at most {_TRACE_MAX_S:g}, got {given!r}", "seconds")
    return seconds


def _comm_policy(info: ModelInfo, engine: EngineClient) -> CommPolicy:
    stats = engine.stats or EngineStats()
    setup = engine.comm_setup or CommSetup(transport=info.plan.transport, num_nodes=1)
    counts = stats.comm
    quantiles = {latency[:3]: latency for latency in engine.comm_latencies}
    bytes_sent, exact_bytes = sum(count.bytes_sent for count in counts), sum(count.exact_bytes for count in counts)
    return CommPolicy(
        **asdict(setup),
        algorithm=info.plan.allreduce,
        sum_dtype=info.plan.sum_dtype,
        layout=info.plan.layout_note or "tensor",
        tp=info.tp,
        dp=info.plan.num_replicas,
        replicas=stats.loads if len(stats.loads) > 1 else [],
        num_steps=stats.counters.num_steps,
        drafts=stats.drafts,
        bytes_sent=bytes_sent,
        exact_bytes=exact_bytes,
        saved_bytes=exact_bytes - bytes_sent,
        counters=[_cost(count, quantiles.get(count[:3])) for count in counts],
    )


def _cost(count: Count, latency: Latency | None) -> CommCost:
    return CommCost(
        *count,
        mean_us=count.seconds / count.calls * 1e6 if count.calls else None,
        p50_us=latency.p50_us if latency else None,
        p99_us=latency.p99_us if latency else None,
        algbw_gb_per_s=count.message_bytes / count.seconds / 1e9 if count.seconds else None,
    )
