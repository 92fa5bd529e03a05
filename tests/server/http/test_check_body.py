"""Unknown fields of a request: ignored, named in a header and once in the log; refused with --strict-fields."""

import logging
import threading
from typing import Any

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of
from pydantic import ValidationError

from tightwire.server.api.errors import ApiError
from tightwire.server.api.request_bodies import Body, ChatBody, CompletionBody, DetokenizeBody
from tightwire.server.config.serve import HttpOptions
from tightwire.server.dialects.messages_request import MessagesBody
from tightwire.server.dialects.responses_request import ResponsesBody
from tightwire.server.http import check_body

USER = {"role": "user", "content": "Hi"}
HEADER = "x-tightwire-ignored"

# Fields of a chat request, and the header that names the ignored ones.
IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"a_field_from_the_future": 1}, "a_field_from_the_future"),
    ({"store": True, "metadata": {"a": "b"}}, "store, metadata"),
    ({"messages": [{**USER, "favourite_colour": "red"}]}, "messages[0].favourite_colour"),
    ({"messages": [USER, {**USER, "reasoning": {"a": [1]}}]}, "messages[1].reasoning"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
        "messages[0].content[0].cache_control",
    ),
    ({"stream": True, "stream_options": {"include_usage": True, "usage": 1}}, "stream_options.usage"),
    ({"tightwire": {"comm": True, "colour": 1}}, "tightwire.colour"),
    ({"provider": {"order": ["a"], "data": {"deep": [{"x": 1}]}}}, "provider"),
    ({"max_token": 5, "model_extra": 1, "model_fields": 2, "copy": 3}, "max_token, model_extra, model_fields, copy"),
    ({"line\r\nSet-Cookie: a": 1, "né, ": 2, "": 3}, "line??Set-Cookie??a, n???, ?"),
    ({f"field{i}": i for i in range(50)}, ", ".join([*(f"field{i}" for i in range(20)), "..."])),
    ({"x" * 500: 1}, "x" * 80),
]
# Fields that are not reported: known ones with a neutral value, and nulls.
SILENT: list[dict[str, Any]] = [
    {"a_field_from_the_future": None},
    {"messages": [{**USER, "refusal": None, "tool_calls": None, "name": None}, {**USER, "tool_calls": []}]},
    {"tool_choice": "none"},
    {"tools": [], "tool_choice": "none", "use_beam_search": False, "response_format": {"type": "text"}},
    {"tools": None, "tool_choice": None},
]


def _client(http: HttpOptions) -> httpx.AsyncClient:
    return client_of(app_for(FakeEngine(), http=http))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "named"), IGNORED, ids=str)
async def test_unknown_fields_are_ignored_and_named(
    client: httpx.AsyncClient, fields: dict[str, Any], named: str, stream: bool
) -> None:
    body = {"messages": [USER], "stream": stream, "max_tokens": 3, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == named
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/responses", {"input": "a", "stream": True}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3, "stream": True}),
    ],
)
async def test_progress_is_ignored_and_named_where_no_chunk_can_tell_it(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    response = await client.post(path, json={**body, "tightwire": {"progress": True}})
    assert (response.status_code, response.headers[HEADER]) == (200, "tightwire.progress")
    assert not engine.submitted[0].progress and '"progress"' not in response.text


@pytest.mark.parametrize("fields", SILENT, ids=str)
async def test_neutral_fields_are_not_named(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post("/v1/chat/completions", json={"messages": [USER], **fields})
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})],
)
async def test_every_route_names_ignored_fields(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await client.post(path, json={**body, "colour": "red"})
    assert (response.status_code, response.headers[HEADER]) == (200, "colour")
    refused = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 999, "colour": "red"})
    assert (refused.status_code, refused.headers[HEADER]) == (400, "colour")


async def test_an_ignored_field_is_logged_once(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    messages = [{**USER, "colour": "red"}] * 3
    with caplog.at_level(logging.INFO, "tightwire"):
        for _ in range(2):
            await client.post("/v1/chat/completions", json={"messages": messages, "max_token": 5, "store": True})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert "'max_token'" in lines[0] and "did you mean 'max_tokens'?" in lines[0]
    assert "'store'" in lines[1] and "openapi" not in lines[1]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert "'messages[].colour'" in lines[2] and "GET /openapi.json" in lines[2]


async def test_the_log_of_ignored_fields_is_bounded(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await client.post("/v1/completions", json={"prompt": "a"} | {f"field{i}": 1 for i in range(3000)})
    assert len(caplog.records) == 1000


async def test_of_a_long_name_only_its_beginning_is_kept(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients choose the names: 1000 of some megabytes would stay in memory for as long as the server runs."""
    for end in ("a", "b"):
        await client.post("/v1/completions", json={"prompt": "a", "x" * 200 + end: 1})
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"a_field_from_the_future": 1}, "a_field_from_the_future", "GET /openapi.json"),
        ({"max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
        ({"messages": [{**USER, "colour": 1}]}, "messages[0].colour", "GET /openapi.json"),
        ({"user": "me", "stream_options": {"x": 1}, "stream": True}, "stream_options.x", "--strict-fields"),
        ({"x" * 500: 1}, "x" * 200, "unknown field"),
    ],
    ids=str,
)
async def test_strict_fields_refuses_unknown_ones(fields: dict[str, Any], param: str, hint: str) -> None:
    async with _client(HttpOptions(strict_fields=True)) as client:
        response = await client.post("/v1/chat/completions", json={"messages": [USER], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unknown_parameter")
    assert hint in error["message"]


async def test_strict_fields_accepts_labels_and_neutral_values() -> None:
    body = {"messages": [USER], "user": "me", "store": True, "metadata": {}, "tools": [], "tool_choice": "none"}
    async with _client(HttpOptions(strict_fields=True)) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.headers[HEADER]) == (200, "user, store, metadata")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CompletionBody, {"prompt": "a", "allowed_token_ids": [1, *["a"] * 99]}, "allowed_token_ids[1]"),
        (ChatBody, {"messages": [1] * 99}, "messages[0]"),
        (DetokenizeBody, {"tokens": [-1] * 99}, "tokens[0]"),
        (ResponsesBody, {"input": [{}] * 99}, "input[0]"),
        (MessagesBody, {"max_tokens": 1, "messages": [1] * 99}, "messages[0]"),
        (ChatBody, {"messages": [USER], "structured_outputs": {"choice": [1] * 99}}, "structured_outputs.choice[0]"),
    ],
)
def test_a_list_ends_at_its_first_invalid_item(kind: type[Body], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_body.check_fields(fields, kind)
    assert caught.value.param == param
    assert isinstance(caught.value.__context__, ValidationError) and caught.value.__context__.error_count() == 1


@pytest.mark.parametrize(("num_messages", "in_thread"), [(1, False), (200, True)])
async def test_long_bodies_are_checked_in_a_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, num_messages: int, in_thread: bool
) -> None:
    check, threads = check_body.check_fields, list[int]()

    def note_thread(fields: dict[str, Any], kind: type[ChatBody]) -> ChatBody:
        threads.append(threading.get_ident())
        return check(fields, kind)

    monkeypatch.setattr(check_body, "check_fields", note_thread)
    await client.post("/v1/chat/completions", json={"messages": [USER] * num_messages})
    [thread] = threads
    assert (thread != threading.get_ident()) == in_thread
