"""API keys from a file: their limits, the file's changes, names in metrics."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of

from tightwire.server.api.errors import ApiError
from tightwire.server.config.keys import ApiKey
from tightwire.server.config.serve import HttpOptions
from tightwire.server.http import keys
from tightwire.server.http.keys import KeyRing

BODY = {"prompt": "abc", "max_tokens": 2}
TEXT = """
keys:
- {name: slow, key: k1, requests_per_minute: 2}
- {name: short, key: k2, tokens_per_minute: 6}
- {name: single, key: k3, requests_at_once: 1}
- {name: free, key: k4}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(TEXT)
    return path


def open_client(engine: FakeEngine, **options: Any) -> httpx.AsyncClient:
    return client_of(app_for(engine, http=HttpOptions(**options)))


async def ask(client: httpx.AsyncClient, key: str) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY, headers={"authorization": f"Bearer {key}"})


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_limits_by_the_minute(path: Path, engine: FakeEngine) -> None:
    async with open_client(engine, api_key_file=str(path), api_key="own") as client:
        assert [(await ask(client, "k1")).status_code for _ in range(3)] == [200, 200, 429]
        # Three prompt tokens and two of the answer each: the second request still starts, with one token left.
        assert [(await ask(client, "k2")).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask(client, "k2")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (
            "6 tokens a minute" in refused.json()["error"]["message"]
            and 40 <= int(refused.headers["retry-after"]) <= 50
        )
        assert {(await ask(client, key)).status_code for key in ("k4", "own")} == {200}
        assert (await ask(client, "k5")).status_code == 401
        # Only POST requests count.
        models = await client.get("/v1/models", headers={"authorization": "Bearer k1"})
        assert models.status_code == 200
        page = (await client.get("/metrics")).text
    for line in (
        'tightwire_key_requests_total{key="slow",outcome="refused"} 1.0',
        'tightwire_key_requests_total{key="short",outcome="accepted"} 2.0',
        'tightwire_key_tokens_total{key="short",kind="prompt"} 6.0',
        'tightwire_key_tokens_total{key="api-key",kind="answer"} 2.0',
    ):
        assert line in page


async def test_requests_at_once(path: Path, engine: FakeEngine) -> None:
    engine.token_s = 0.2
    async with open_client(engine, api_key_file=str(path)) as client:
        answers = await asyncio.gather(*(ask(client, "k3") for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
        assert {a.headers["retry-after"] for a in answers if a.status_code == 429} == {"1"}
        assert (await ask(client, "k3")).status_code == 200


def test_allowances_fill_up_with_time() -> None:
    clock = Clock()
    ring, key = KeyRing(HttpOptions(api_key="k"), clock), ApiKey(name="a", requests_per_minute=2, tokens_per_minute=60)
    for _ in range(2):
        ring.begin(key)
        ring.end(key, 0)
    with pytest.raises(ApiError, match="2 requests a minute; try again in 30 s"):
        ring.begin(key)
    clock.now_s += 30
    ring.begin(key)
    ring.end(key, 100)  # 40 more than the allowance
    clock.now_s += 30
    with pytest.raises(ApiError, match="60 tokens a minute; try again in 11 s"):
        ring.begin(key)
    clock.now_s += 11
    ring.begin(key)
    clock.now_s += 1e6
    for _ in range(2):  # the allowance of one minute at most
        ring.begin(key)
    with pytest.raises(ApiError, match="2 requests a minute"):
        ring.begin(key)


def test_a_changed_file_is_read_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    ring = KeyRing(HttpOptions(api_key_file=str(path)), clock)

    def names(text: str | None) -> list[str | None]:
        if text is None:
            path.unlink()
        else:
            path.with_suffix(".new").write_text(text)
            os.replace(path.with_suffix(".new"), path)
        clock.now_s += 2
        return [key and key.name for key in map(ring.find, (b"k1", b"k9"))]

    assert names("keys: [{name: new, key: k9}]") == [None, "new"]
    assert names("keys: [{name: new, key: k9}, {name: new, key: k1}]") == [None, "new"]
    assert names(None) == [None, "new"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    assert "given twice; the keys read before stay valid" in caplog.text and "k9" not in caplog.text
    assert names(TEXT) == ["slow", None]


def test_the_name_of_the_other_option_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: {keys.API_KEY_NAME}, key: a}}]")
    with pytest.raises(ValueError, match="belongs to the key of --api-key"):
        KeyRing(HttpOptions(api_key="b", api_key_file=str(path)))


async def test_a_request_that_the_queue_refuses_costs_no_tokens(path: Path, engine: FakeEngine) -> None:
    engine.full = True
    async with open_client(engine, api_key_file=str(path)) as client:
        assert [(await ask(client, "k2")).json()["error"]["code"] for _ in range(4)] == ["queue_full"] * 4
