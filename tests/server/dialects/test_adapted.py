"""What Responses and Messages share with chat: LoRA adapters by name, extensions, tokens counted for a key."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.server.fake_engine import INFO, FakeEngine, app_for, client_of

from tightwire.server.api.lora import Adapters
from tightwire.server.plan.rank_setup import ServedAdapter

BODIES = {
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
}


async def ask(engine: FakeEngine, path: str, **fields: Any) -> Any:
    adapters = Adapters([ServedAdapter(id=7, name="poet", folder="/x", digest="d")])
    async with client_of(app_for(engine, info=replace(INFO, adapters=adapters))) as client:
        response = await client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_an_adapter_is_chosen_by_model(path: str) -> None:
    engine = FakeEngine()
    assert (await ask(engine, path, model="poet"))["model"] == "poet"
    assert (await ask(engine, path))["model"] == "tiny"
    assert [request.adapter for request in engine.submitted] == [7, 0]


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_extensions_of_chat_work(path: str) -> None:
    engine = FakeEngine()
    fields = {"seed": 5, "min_p": 0.25, "bad_words": ["x"], "cache_salt": "s", "tightwire": {"token_ids": True}}
    answer = await ask(engine, path, **fields)
    [request] = engine.submitted
    assert (request.params.seed, request.params.min_p, request.cache_salt) == (5, 0.25, "s")
    assert answer["tightwire"]["token_ids"] == [[*b"Hel"]]
