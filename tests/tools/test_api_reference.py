"""docs/api.md is current, and each row of its tables is true: the field works, is ignored, or is refused."""

from typing import Any, Required, get_origin

import api_reference
import httpx
import pytest
from helpers.server import fake_engine
from helpers.server.fake_engine import FakeEngine, app_for, client_of
from nested_fields import Entry, fields_of, literals, members

CHAT = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 5},
}
SCHEMA = {"type": "object"}
_FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
# A value of each field that is not its default; one of several routes where they agree.
SAMPLES: dict[str, Any] = {
    "audio": {"format": "wav", "voice": "a"},
    "background": True,
    "best_of": 2,
    "container": "c",
    "conversation": "c",
    "echo": True,
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "include": ["message.output_text.logprobs"],
    "input": [{"role": "user", "content": "Hi"}],
    "instructions": "Be short.",
    "logit_bias": {"65": 1},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}],
    "messages": CHAT,
    "metadata": {"user_id": "u"},
    "modalities": ["text", "audio"],
    "model": "tiny",
    "moderation": {"model": "m"},
    "n": 2,
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "a"},
    "presence_penalty": 0.5,
    "previous_response_id": "resp_1",
    "prompt": "Hi",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "seed": 3,
    "service_tier": "auto",
    "stop": ["x"],
    "stop_sequences": ["x"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "a",
    "system": "Be short.",
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "disabled"},
    "tool_choice": "none",
    "tools": [_FUNCTION],
    "top_k": 3,
    "top_logprobs": 2,
    "top_p": 0.5,
    "verbosity": "high",
    "web_search_options": {"search_context_size": "low"},
}
OF_ROUTE: dict[tuple[str, str], Any] = {
    ("/v1/completions", "logprobs"): 2,
    ("/v1/responses", "prompt"): {"id": "p"},
    ("/v1/responses", "stream_options"): {"include_obfuscation": False},
    ("/v1/responses", "tools"): [{"type": "function", "name": "f", "parameters": SCHEMA}],
    ("/v1/messages", "tools"): [{"name": "f", "input_schema": SCHEMA}],
    ("/v1/messages", "tool_choice"): {"type": "none"},
}
# Fields that only work together with another.
TOGETHER: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True},
    ("/v1/chat/completions", "stream_options"): {"stream": True},
    ("/v1/completions", "stream_options"): {"stream": True},
    ("/v1/responses", "stream_options"): {"stream": True},
}
# Fields that this server requires and the clients' types do not, and values that the types do not tell.
NEEDED = {"call_id", "content", "schema"}
NESTED_SAMPLES: dict[str, Any] = {
    "arguments": "{}",
    "call_id": "c",
    "content": "Hi",
    "input": {},
    "input_schema": SCHEMA,
    "name": "f",
    "parameters": SCHEMA,
    "schema": SCHEMA,
    "tools": [{"type": "function", "name": "f", "function": {"name": "f"}}],
}
INFO = fake_engine.planned(max_model_len=4096)  # a prompt with tools has 900 bytes


def open_client(engine: FakeEngine) -> httpx.AsyncClient:
    return client_of(app_for(engine, info=INFO))


def test_the_page_is_current() -> None:
    assert api_reference.current() == api_reference.render(), "run `python tools/api_reference.py`"


@pytest.mark.parametrize("path", api_reference.PATHS)
async def test_each_row_is_true(path: str, engine: FakeEngine) -> None:
    rows = api_reference.rows(path)
    assert len(rows) > 15
    async with open_client(engine) as client:
        for row in rows:
            body = {**BODIES[path], **TOGETHER.get((path, row.field), {}), row.field: _sample(path, row.field)}
            response = await client.post(path, json=body)
            ignored = response.headers.get("x-tightwire-ignored", "").split(", ")
            if row.status == "refused":
                assert response.status_code == 400, row
                assert row.field in response.json()["error"]["message"], row
                for neutral in api_reference.body_of(path).unsupported[row.field][0]:
                    assert (await client.post(path, json={**body, row.field: neutral})).status_code == 200, row
                continue
            assert response.status_code == 200, (row, response.text)
            is_named = row.status == "ignored" and row.field not in api_reference.body_of(path).model_fields
            assert (row.field in ignored) == is_named, row


@pytest.mark.parametrize("path", api_reference.PATHS)
async def test_each_nested_entry_is_true(path: str, engine: FakeEngine) -> None:
    entries = api_reference.nested(path)
    assert len(entries) > 40 or path == "/v1/completions"
    async with open_client(engine) as client:
        for entry in entries:
            field = entry.steps[0].field
            others = {"tools": _sample(path, "tools")} if field == "tool_choice" else TOGETHER.get((path, field), {})
            body = {**BODIES[path], **others, **_nested_sample(entry)}
            response = await client.post(path, json=body)
            ignored = response.headers.get("x-tightwire-ignored", "")
            assert response.status_code == (400 if entry.status == "refused" else 200), (entry, body, response.text)
            if entry.status == "refused":
                assert response.json()["error"]["param"].startswith(field), (entry, response.text)
            elif not entry.kind:
                is_named = entry.status == "ignored" and not entry.is_known
                assert (f".{entry.name}" in ignored) == is_named, (entry, ignored)


def _nested_sample(entry: Entry) -> dict[str, Any]:
    """The body's field with the smallest object of the client's type that has the entry's field, or is of its kind."""
    *_, last = entry.steps
    hints = fields_of(last.kind)
    own = {entry.kind: entry.name} if entry.kind in hints else {}
    value = _smallest(last.kind) | own
    if not entry.kind:
        value[entry.name] = _value(entry.name, hints[entry.name])
    for inner, outer in zip(reversed(entry.steps), reversed((None, *entry.steps[:-1])), strict=True):
        if inner.is_list:
            value = [*CHAT, value] if inner.field in ("messages", "input") else [value]
        value = {**(_smallest(outer.kind) if outer else {}), inner.field: value}
    return value


def _smallest(kind: type) -> dict[str, Any]:
    """The fields that the client's type or this server requires."""
    hints = fields_of(kind)
    return {name: _value(name, hint) for name, hint in hints.items() if get_origin(hint) is Required or name in NEEDED}


def _value(name: str, annotation: Any) -> Any:
    if values := literals(annotation):
        return values[0]
    if name in NESTED_SAMPLES:
        return NESTED_SAMPLES[name]
    for kind, is_list in members(annotation):
        return [_smallest(kind)] if is_list else _smallest(kind)
    return next(
        (sample for word, sample in (("bool", True), ("int", 1), ("str", "sample")) if word in str(annotation)), {}
    )


def _sample(path: str, field: str) -> Any:
    return OF_ROUTE.get((path, field), SAMPLES.get(field, "sample"))


async def test_sampling_parameters_reach_the_engine(engine: FakeEngine) -> None:
    given = {"temperature": 0.5, "top_p": 0.25}
    limits = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_tokens")
    async with open_client(engine) as client:
        for path, limit in zip(api_reference.PATHS, limits, strict=True):
            response = await client.post(path, json={**BODIES[path], **given, limit: 3})
            assert response.status_code == 200, response.text
            params = engine.submitted[-1].params
            assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 3)
