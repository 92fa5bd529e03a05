"""Puts the HTTP application together (routes, error envelope, API key, request id), and runs it with uvicorn."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from tightwire import __version__
from tightwire.server.api.errors import install_error_handlers
from tightwire.server.api.metrics import Metrics
from tightwire.server.api.serving import ModelHolder, Serving
from tightwire.server.config.serve import HttpOptions
from tightwire.server.http.middleware import RequestScope, RequireKey
from tightwire.server.http.openapi import make_page
from tightwire.server.http.routes.observe import observe_router
from tightwire.server.http.routes.openai import openai_router
from tightwire.server.http.routes.pages import pages_router
from tightwire.server.ipc.engine_client import EngineClient

_KEEP_ALIVE_S = 75  # longer than common clients keep an idle connection, so that the client closes it, not the server
_LAST_RESPONSES_S = 3
_DESCRIPTION = "OpenAI's API for one Llama model, split over ranks. Every error is an ErrorBody."


def make_app(*, engine: EngineClient, holder: ModelHolder, http: HttpOptions) -> FastAPI:
    """The application for one engine. The API answers 503 until ``holder`` has the model and ``engine`` is ready."""
    serving = Serving(
        engine=engine,
        holder=holder,
        http=http,
        metrics=Metrics(
            lambda: engine.stats,
            lambda: holder.startup_s,
            lambda: engine.comm_setup,
            alias=http.metrics_alias,
            model_name=lambda: holder.model.info.name if holder.model else None,
        ),
    )
    app = FastAPI(
        title="Tightwire",
        version=__version__,
        description=_DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads its program from another server; ours needs none
        redoc_url=None,
    )
    app.include_router(openai_router(serving))
    app.include_router(observe_router(serving))
    app.include_router(pages_router())
    app.openapi = functools.cache(lambda: make_page(app, http.api_key is not None))
    install_error_handlers(app)
    if http.api_key is not None:
        app.add_middleware(RequireKey, api_key=http.api_key)
    app.add_middleware(RequestScope)  # the last one added is the outermost
    return app


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ignore signals: ``launch`` drains the engine before this server closes."""
        yield


@contextlib.asynccontextmanager
async def run_server(app: Any, listener: socket.socket) -> AsyncIterator[None]:
    """Serve while the context is open; when it closes, finish the last responses."""
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
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
