"""The request log: a line of JSON for each request, with prompts only if asked; rotation; pages of other origins."""

import json
from pathlib import Path
from typing import Any

import httpx
from helpers.server.fake_engine import FakeEngine, app_for, client_of

from tightwire.server.config.serve import HttpOptions

CHAT = {"messages": [{"role": "user", "content": "a secret question"}], "max_tokens": 3}


def open_client(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
    return client_of(app_for(engine, http=HttpOptions(**options)))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_for_each_request(tmp_path: Path, engine: FakeEngine) -> None:
    path = tmp_path / "requests.jsonl"
    async with open_client(engine, request_log=str(path), api_key="k") as client:
        good = {"authorization": "Bearer k", "x-request-id": "mine"}
        for body in (CHAT, {**CHAT, "stream": True}):
            assert (await client.post("/v1/chat/completions", json=body, headers=good)).status_code == 200
        await client.post("/v1/chat/completions", json={}, headers=good)
        await client.post("/v1/completions", json={"prompt": "a"})
        await client.get("/v1/models", headers=good)
        await client.get("/health")
        await client.get("/metrics")
    whole, stream, invalid, closed, listed = lines(path)
    assert "secret" not in path.read_text()
    assert whole.pop("time")[:2] == "20" and 0 < whole.pop("ttft_s") < whole.pop("total_s") < 60
    num_prompt = whole.pop("prompt_tokens")
    assert num_prompt > 10 and whole == {
        "id": "mine",
        "key": "api-key",
        "method": "POST",
        "route": "/v1/chat/completions",
        "model": "tiny",
        "status": 200,
        "finish_reasons": ["length"],
        "completion_tokens": 3,
    }
    assert (stream["completion_tokens"], stream["prompt_tokens"], stream["status"]) == (3, num_prompt, 200)
    assert (invalid["status"], invalid["prompt_tokens"], invalid["ttft_s"], invalid["key"]) == (400, 0, None, "api-key")
    assert (closed["status"], closed["key"]) == (401, None)
    assert (listed["method"], listed["route"], listed["status"]) == ("GET", "/v1/models", 200)


async def test_prompts_if_asked_and_a_rotated_file(tmp_path: Path, engine: FakeEngine) -> None:
    path = tmp_path / "requests.jsonl"
    async with open_client(engine, request_log=str(path), request_log_prompts=True) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        path.rename(tmp_path / "old.jsonl")
        await client.post("/v1/completions", json={"prompt": ["a", "b"]})
    [chat], [completion] = lines(tmp_path / "old.jsonl"), lines(path)
    assert chat["messages"][0]["content"] == [{"type": "text", "text": "a secret question"}]
    assert completion["prompt"] == ["a", "b"]


async def test_a_log_that_cannot_be_written_does_not_break_answers(tmp_path: Path, engine: FakeEngine) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with open_client(engine, request_log=str(folder / "log")) as client:
        (folder / "log").unlink()
        folder.rmdir()
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_pages_of_other_origins(engine: FakeEngine) -> None:
    async with open_client(engine, cors_origin=("https://a.example", "http://b:3000"), api_key="k") as client:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        allowed = await client.options("/v1/chat/completions", headers={"origin": "https://a.example", **asks})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = await client.options("/v1/chat/completions", headers={"origin": "https://c.example", **asks})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        refused = await client.get("/v1/models", headers={"origin": "http://b:3000"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://b:3000")
        assert "X-Request-Id, request-id" in refused.headers["access-control-expose-headers"]
    async with open_client(engine) as client:
        assert "access-control-allow-origin" not in (await client.get("/", headers={"origin": "http://a"})).headers
