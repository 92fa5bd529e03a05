"""Random changes to valid bodies of /v1/responses and /v1/messages: no 5xx, and errors in the form of each API."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of, planned

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "reasoning", "summary": []},
    ],
    "instructions": "b",
    "max_output_tokens": 5,
    "stop": ["x"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}, {"type": "web_search"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "temperature": 1.0,
    "store": True,
    "tightwire": {"comm": True, "timing": True, "token_ids": True},
}
COUNT: dict[str, Any] = {
    "model": "tiny",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]}],
        },
        {"role": "assistant", "content": "pre"},
    ],
    "tools": [{"name": "add", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}
MESSAGES: dict[str, Any] = COUNT | {
    "max_tokens": 5,
    "stop_sequences": ["x"],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "x"},
    "temperature": 0.3,
}
ODD: list[Any] = [
    *(None, [], {}, "", "x", 0, -1, 2**31, 2**63, 10**39, 1e308, True, [None], [[]], [{}], "a" * 3000, {"": {}}),
    *({"type": None}, {"type": "image"}, {"type": ["text"]}, {"type": {"a": 1}}, {"type": "text"}, {"~x": 1}, "~text"),
    *({"type": "function"}, {"role": "system", "content": ""}, {"$ref": "#"}, "none", "required", {"type": "any"}),
    *("=add", {"type": "tool", "name": ""}, "assistant", "system", "tool"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield (*path, key)
        yield from places(part, (*path, key))


def changed(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The body with one to three values removed, replaced by odd ones, or added."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        *path, last = rng.choice(list(places(body)) or [("input",)])
        parent: Any = body
        for key in path:
            parent = parent[key]
        odd, kind = copy.deepcopy(rng.choice(ODD)), rng.random()
        if kind < 0.2:
            parent.pop(last, None) if isinstance(parent, dict) else parent.pop(last)
        elif kind < 0.4 and isinstance(parent, dict):
            parent[rng.choice(("n", "input", "messages", "prompt", "type", "content", "id", "x" * 300, "é"))] = odd
        elif kind < 0.4:
            parent.insert(last, odd)
        else:
            parent[last] = odd
    return body


@pytest.mark.parametrize(
    ("path", "valid"),
    [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", COUNT)],
    ids=("responses", "messages", "count_tokens"),
)
async def test_no_server_error_and_errors_of_this_api(path: str, valid: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    rng, statuses = random.Random(5), set[int]()
    async with client_of(app_for(FakeEngine(), info=planned(max_model_len=8192))) as client:
        for number in range(150):
            body = changed(valid, rng) | ({"stream": True} if number % 3 == 0 else {})
            response = await client.post(path, json=body)
            statuses.add(response.status_code)
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code == 200:
                assert '"type":"error"' not in response.text, body
                continue
            answer = response.json()
            assert (answer.get("type") == "error") == path.startswith("/v1/messages")
            assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")
            assert "response_format" not in json.dumps(answer), body
    assert {200, 400} <= statuses


@pytest.mark.parametrize("depth", [200, 300, 949, 960, 5000])
async def test_deep_nesting_is_no_server_error(depth: int) -> None:
    deep = '{"a":' * depth + "{}" + "}" * depth
    hi = '"messages": [{"role": "user", "content": "x"}]'
    used = f'{{"type": "tool_use", "id": "a", "name": "b", "input": {deep}}}'
    args = json.dumps(deep)
    bodies = [
        ("/v1/messages", f'{{"max_tokens": 3, "messages": [{{"role": "assistant", "content": [{used}]}}]}}'),
        ("/v1/messages", f'{{"max_tokens": 3, "tools": [{{"name": "a", "input_schema": {deep}}}], {hi}}}'),
        ("/v1/responses", f'{{"input": "x", "tools": [{{"type": "function", "name": "a", "parameters": {deep}}}]}}'),
        (
            "/v1/responses",
            f'{{"input": [{{"type": "function_call", "call_id": "a", "name": "a", "arguments": {args}}}]}}',
        ),
    ]
    async with client_of(app_for(FakeEngine(), info=planned(max_model_len=100_000))) as client:
        for path, body in bodies:
            headers = {"content-type": "application/json"}
            response = await client.post(path, content=body, headers=headers)
            is_text = "function_call" in body  # its arguments are a text, which may be nested
            assert response.status_code == (200 if depth < 256 or is_text else 400), response.text
