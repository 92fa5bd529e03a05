"""Puts the HTTP application together (routes, error envelope, API key, request id), and runs it with uvicorn."""

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from tightwire import __version__
from tightwire.server.api.errors import install_error_handlers
from tightwire.server.api.metrics import Metrics
from tightwire.server.api.serving import ModelHolder, Serving
from tightwire.server.api.trace import Recorder
from tightwire.server.config.http import HttpOptions, wants_traces
from tightwire.server.config.lora import AdapterOptions
from tightwire.server.http.keys import KeyRing
from tightwire.server.http.middleware import EXPOSED_HEADERS, RequestScope, RequireKey
from tightwire.server.http.openapi import make_page
from tightwire.server.http.request_log import RequestLog
from tightwire.server.http.routes.api import api_router
from tightwire.server.http.routes.observe import observe_router
from tightwire.server.http.routes.pages import pages_router
from tightwire.server.http.telemetry import Telemetry
from tightwire.server.ipc.engine_client import EngineClient

_KEEP_ALIVE_S = 75  # longer than common clients keep an idle connection, so that the client closes it, not the server
_LAST_RESPONSES_S = 3
_ERRORS = "Every error is an ErrorBody, under /v1/messages a MessagesErrorBody."
_DESCRIPTION = f"OpenAI's and Anthropic's APIs for one model, split over ranks. {_ERRORS}"


def make_app(
    *, engine: EngineClient, holder: ModelHolder, http: HttpOptions, adapters: AdapterOptions | None = None
) -> FastAPI:
    """The application for one engine. The API answers 503 until ``holder`` has the model and ``engine`` is ready."""
    metrics = Metrics(
        lambda: engine.stats,
        lambda: holder.startup_s,
        lambda: engine.comm_setup,
        alias=http.metrics_alias,
        model_name=lambda: holder.model.info.name if holder.model else None,
    )
    serving = Serving(engine=engine, holder=holder, http=http, adapters=adapters or AdapterOptions(), metrics=metrics)
    app = FastAPI(
        title="Tightwire",
        version=__version__,
        description=_DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads its program from another server; ours needs none
        redoc_url=None,
    )
    app.include_router(api_router(serving))
    app.include_router(observe_router(serving))
    app.include_router(pages_router())
    app.openapi = functools.cache(lambda: make_page(app, http.needs_key))
    install_error_handlers(app)
    # The last one added is the outermost.
    if http.needs_key:
        app.add_middleware(RequireKey, keys=KeyRing(http), metrics=metrics)
    recorders: list[Recorder] = []
    app.state.close = lambda: None  # called at the end, when the last response is sent
    if http.request_log is not None:
        recorders.append(RequestLog(http.request_log, prompts=http.request_log_prompts))
    if wants_traces(http.otlp_endpoint, os.environ):
        recorders.append(telemetry := Telemetry(http.otlp_endpoint))
        app.state.close = telemetry.close
    app.add_middleware(RequestScope, recorders=recorders)
    if http.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=http.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return app


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ignore signals: ``launch`` drains the engine before this server closes."""
        yield


@contextlib.asynccontextmanager
async def run_server(app: Any, listener: socket.socket, http: HttpOptions) -> AsyncIterator[None]:
    """Serve while the context is open; when it closes, finish the last responses."""
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ssl_certfile=http.ssl_certfile,
            ssl_keyfile=http.ssl_keyfile,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_RESPONSES_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield
    finally:
        server.should_exit = True
        await serving
