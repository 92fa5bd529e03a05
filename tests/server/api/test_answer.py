"""A client that disconnects, streaming or not, cancels its sequences; every stream ends properly."""

import asyncio
import gc
import json
from typing import Any

import pytest
from fastapi import FastAPI
from helpers.server.fake_engine import FakeEngine, app_for

from tightwire.server.api.answer import Answer, cancel_on_disconnect
from tightwire.server.api.errors import ApiError

PROMPT = {"prompt": "a", "max_tokens": 50, "n": 3}


class Caller:
    """Calls an ASGI app as a server does, and can disconnect in the middle, unlike httpx's transport."""

    def __init__(self, app: FastAPI, body: dict[str, Any], *, path: str = "/v1/completions") -> None:
        self._app = app
        self._body = json.dumps(body).encode()
        self._path = path
        self._gone = asyncio.Event()
        self._asked = False
        self.sent: list[dict[str, Any]] = []
        self.got_data = asyncio.Event()

    def hang_up(self) -> None:
        self._gone.set()

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": headers,
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        await asyncio.wait_for(self._app(scope, self._receive, self._send), timeout=60)

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_data.set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hangs_after", [0, 4])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_disconnect_cancels_what_runs(engine: FakeEngine, path: str, stream: bool, hangs_after: int) -> None:
    engine.hangs_after = hangs_after
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": PROMPT,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 3},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 50},
    }
    caller = Caller(app_for(engine), {**bodies[path], "stream": stream}, path=path)
    call = asyncio.create_task(caller.run())
    await asyncio.wait_for(engine.hanging.wait(), timeout=60)
    assert len(engine.live) == bodies[path].get("n", 1)
    caller.hang_up()
    await call
    assert engine.live == set()
    assert engine.cancelled == {request.id for request in engine.submitted}
    sent = b"".join(message.get("body", b"") for message in caller.sent)
    assert b"[DONE]" not in sent and b"message_stop" not in sent


async def test_disconnect_while_the_prompt_is_computed(engine: FakeEngine) -> None:
    engine.hangs_after, engine.chunk_tokens = 6, 1
    body = {**PROMPT, "prompt": "a" * 20, "stream": True, "tightwire": {"progress": True}}
    caller = Caller(app_for(engine), body)
    call = asyncio.create_task(caller.run())
    await asyncio.wait_for(engine.hanging.wait(), timeout=60)
    caller.hang_up()
    await call
    assert engine.live == set() and len(engine.cancelled) == 3
    bodies = b"".join(message.get("body", b"") for message in caller.sent)
    assert b'"computed":2' in bodies and b"[DONE]" not in bodies


async def test_disconnect_while_the_client_reads_slowly(engine: FakeEngine) -> None:
    class Slow(Caller):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if message.get("body"):
                await asyncio.Event().wait()

    caller = Slow(app_for(engine), {**PROMPT, "stream": True})
    call = asyncio.create_task(caller.run())
    await asyncio.wait_for(caller.got_data.wait(), timeout=60)
    caller.hang_up()
    await call
    assert engine.live == set() and len(engine.cancelled) == 3


async def test_cancelling_the_response_task_cancels_the_sequences(engine: FakeEngine) -> None:
    engine.hangs_after = 4
    call = asyncio.create_task(Caller(app_for(engine), {**PROMPT, "stream": True}).run())
    await asyncio.wait_for(engine.hanging.wait(), timeout=60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.live == set() and len(engine.cancelled) == 3


async def test_finished_request_cancels_nothing(engine: FakeEngine) -> None:
    caller = Caller(app_for(engine), {**PROMPT, "stream": True})
    await caller.run()
    assert engine.cancelled == set()
    assert caller.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert caller.sent[-2]["body"] == b"data: [DONE]\n\n"
    headers = dict(caller.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert headers[b"cache-control"] == b"no-cache" and headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hangs_after", [None, 4])
async def test_an_ended_request_does_not_wait_for_the_garbage_collector(
    engine: FakeEngine, stream: bool, hangs_after: int | None
) -> None:
    gc.collect()
    gc.disable()
    try:
        engine.hangs_after = hangs_after
        caller = Caller(app_for(engine), {**PROMPT, "stream": stream})
        call = asyncio.create_task(caller.run())
        if hangs_after is not None:
            await asyncio.wait_for(engine.hanging.wait(), timeout=60)
            caller.hang_up()
        await call
        assert not [each for each in gc.get_objects() if type(each) is Answer]
    finally:
        gc.enable()


async def test_cancel_on_disconnect_returns_the_result_or_raises() -> None:
    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def fails() -> None:
        raise KeyError("x")

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    assert await cancel_on_disconnect(never, asyncio.sleep(0, "result")) == "result"
    with pytest.raises(KeyError):
        await cancel_on_disconnect(never, fails())
    with pytest.raises(ApiError, match="the client closed its connection"):
        await cancel_on_disconnect(gone, never())
