"""Errors reach the client as error objects; in a started stream, as an error event."""

import json
import logging
from collections.abc import AsyncGenerator, Sequence

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of
from starlette.exceptions import HTTPException

from tightwire.server.api.errors import ApiError, to_api_error
from tightwire.server.ipc.messages import AddRequest, Output

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def _frames(response: httpx.Response) -> list[str]:
    return [frame.removeprefix("data: ") for frame in response.text.split("\n\n") if frame]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_engine_death_in_a_stream_is_an_error_event_and_done(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.dies_after = 3
    body = {"prompt": "a"} if path == "/v1/completions" else CHAT
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    *chunks, error, done = _frames(response)
    assert done == "[DONE]"
    assert json.loads(error) == {
        "error": {
            "message": "the engine died: rank 1 was killed",
            "type": "service_unavailable_error",
            "param": None,
            "code": "unavailable",
        }
    }
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert engine.live == set()


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_death_before_the_first_token_is_503(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.dies_after = 0
    response = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert response.status_code == 503
    assert "rank 1 was killed" in response.json()["error"]["message"]
    again = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert again.status_code == 503 and "has failed: rank 1 was killed" in again.json()["error"]["message"]


async def test_engine_death_without_stream_is_503(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.dies_after = 5
    response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("cancelled", 503)])
async def test_sequence_that_the_engine_ends_with_an_error(
    client: httpx.AsyncClient, engine: FakeEngine, reason: str, status: int
) -> None:
    engine.gives_up = reason
    response = await client.post("/v1/completions", json={"prompt": "a", "n": 2})
    assert response.status_code == status
    assert "out of blocks" in response.json()["error"]["message"]
    assert engine.live == set()


async def test_stream_without_finish_reason_is_an_error() -> None:
    class Forgetful(FakeEngine):
        async def submit(self, requests: Sequence[AddRequest]) -> AsyncGenerator[Output, None]:
            yield Output(id=requests[0].id, token_ids=[65])

    async with client_of(app_for(Forgetful())) as client:
        whole = await client.post("/v1/completions", json={"prompt": "a"})
        streamed = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert whole.status_code == 500 and "finish reason" in whole.json()["error"]["message"]
    assert "finish reason" in json.loads(_frames(streamed)[-2])["error"]["message"]


async def test_unexpected_error_is_a_500_without_details_and_a_log_record(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        async def submit(self, requests: Sequence[AddRequest]) -> AsyncGenerator[Output, None]:
            raise RuntimeError("secret detail")
            yield

    async with client_of(app_for(Broken())) as client:
        with caplog.at_level(logging.ERROR):
            response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "r-1"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] == "r-1"
    assert "r-1" in caplog.text and "secret detail" in caplog.text


def test_every_exception_has_an_envelope() -> None:
    assert to_api_error(ApiError(404, "x", param="model", code="c")).body().error.param == "model"
    teapot = to_api_error(HTTPException(418, "teapot"))
    assert (teapot.status, teapot.body().error.type) == (418, "invalid_request_error")
    assert to_api_error(ZeroDivisionError()).body().error.type == "server_error"
