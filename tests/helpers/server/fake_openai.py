"""A small OpenAI server on a real socket, in a thread: what the bench and the terminal chat are tested against.

It answers with as many words as tokens were asked for, at a set pace, and misbehaves when told to.
"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass(kw_only=True)
class FakeServer:
    """How it behaves; and, in ``bodies``, every request it got."""

    model: str = "fake-model"
    api_key: str | None = None
    first_token_s: float = 0.0
    token_s: float = 0.0
    answer: list[str] | None = None  # the tokens of every answer; default: word after word
    tokens_per_word: int = 1
    template_tokens: int = 0
    context: int | None = None  # more prompt tokens are refused
    cached_tokens: int = 0
    usage: bool = True
    odd_usage: dict[str, Any] | None = None  # sent instead
    ends_after: int | None = None  # tokens, however many were asked for
    breaks_after: int | None = None  # tokens, then the stream just ends
    error_after: int | None = None  # tokens, then an error event
    refuses: tuple[int, str] | None = None  # status and message
    refuses_from: int = 0  # the number of the first request that is refused
    refuses_fields: tuple[str, ...] = ()  # of a request's body, as servers do that do not know them
    metrics: str = ""
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed_early: threading.Event = field(default_factory=threading.Event)
    in_flight: int = 0
    peak_in_flight: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/metrics", self._metrics),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, "bad key")
        return None

    async def _models(self, request: Request) -> Response:
        if self.refuses and self.refuses[0] == 503 and len(self.bodies) > self.refuses_from:
            return _error(*self.refuses)  # which is a server that is gone
        return self._refusal(request) or JSONResponse({"object": "list", "data": [{"id": self.model}]})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refuses and len(self.bodies) > self.refuses_from:
            return _error(*self.refuses)
        if unknown := set(self.refuses_fields) & set(body):
            return _error(422, f"extra fields not permitted: {', '.join(sorted(unknown))}")
        if self.context is not None and self._usage(body, 0)["prompt_tokens"] > self.context:
            return _error(400, f"longer than the context of {self.context}")
        return self._refusal(request) or StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            async for event in self._tokens(body):
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        except asyncio.CancelledError:
            self.closed_early.set()
            raise
        finally:
            self.in_flight -= 1
        if self.breaks_after is None:
            yield b"data: [DONE]\n\n"

    async def _tokens(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        chat = "messages" in body
        words = self.answer or [f"w{i} " for i in range(self.ends_after or body.get("max_tokens", 4))]
        await asyncio.sleep(self.first_token_s)
        for i, word in enumerate(words):
            if i == self.breaks_after:
                return
            if i == self.error_after:
                yield {"error": {"message": "the engine died", "type": "server_error"}}
                return
            last = "length" if i == len(words) - 1 else None
            text = {"delta": {"content": word}} if chat else {"text": word}
            yield {"choices": [{**text, "finish_reason": last}], "usage": None}
            await asyncio.sleep(self.token_s)
        if self.usage and body.get("stream_options"):
            yield {"choices": [], "usage": self._usage(body, len(words))}

    def _usage(self, body: dict[str, Any], num_generated: int) -> dict[str, Any]:
        if self.odd_usage is not None:
            return self.odd_usage
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        return {
            "prompt_tokens": len(text.split() if isinstance(text, str) else text) * self.tokens_per_word
            + self.template_tokens,
            "completion_tokens": num_generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": None}}, status_code=status)


class _Server(uvicorn.Server):
    """Stops at once; uvicorn's own loop looks every tenth of a second, which adds up over many tests."""

    async def main_loop(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self._stop.wait()

    def stop(self) -> None:
        self.should_exit = self.force_exit = True
        self._loop.call_soon_threadsafe(self._stop.set)


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Serve ``fake`` on a free port for the length of the block."""
    server = _Server(uvicorn.Config(fake.app(), port=0, ws="none", lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10.0
    while not server.started:
        assert time.monotonic() < deadline, "the fake server did not start"
        time.sleep(0.005)
    fake.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.stop()
        thread.join(10.0)
        assert not thread.is_alive(), "the fake server did not stop"
