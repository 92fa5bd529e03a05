"""Invalid input: a 4xx that names the field and says what to do."""

import json
from typing import Any

import httpx
import msgspec
import pytest
from helpers.server.fake_engine import FakeEngine

from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.api.errors import ApiError
from tightwire.server.api.request_bodies import IGNORED_FIELDS, UNSUPPORTED_FIELDS, ChatBody, CompletionBody, Message
from tightwire.server.http.check_body import check_fields

USER = {"role": "user", "content": "Hi"}

# Fields beside a good prompt, the field the error must name, a part of its message.
BAD_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 300}, "max_tokens", "exceed the model's 256; shorten the prompt or ask for at most 2"),
    ({"max_tokens": 10**50}, "max_tokens", "a huge integer"),
    ({"max_tokens": "5"}, "max_tokens", "got '5'"),
    ({"max_tokens": 4.5}, "max_tokens", "valid integer, got 4.5"),
    ({"max_tokens": 1e300}, "max_tokens", "less than"),
    ({"max_tokens": True}, "max_tokens", "got True"),
    ({"n": 0}, "n", "got 0"),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"seed": -(2**63) - 1}, "seed", "greater than"),
    ({"seed": 1.5}, "seed", "got 1.5"),
    ({"temperature": -0.1}, "temperature", "got -0.1"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"temperature": "hot"}, "temperature", "got 'hot'"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.01}, "top_p", "got 1.01"),
    ({"top_k": -2}, "top_k", "got -2"),
    ({"min_p": 1.5}, "min_p", "got 1.5"),
    ({"presence_penalty": 2.5}, "presence_penalty", "got 2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "got -2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "got 0"),
    ({"logit_bias": {"304": 1}}, "logit_bias", "token id 304; the vocabulary of 'tiny' is 0 to 303"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "the key '-1'"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "the key 'a'"),
    ({"logit_bias": {"9" * 50: 1}}, "logit_bias", "keys are token ids"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"1": "2"}}, "logit_bias", "must be a number"),
    ({"logit_bias": [1]}, "logit_bias", "must be an object"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": [5]}, "stop", "a string or a list of strings"),
    ({"stop": ""}, "stop", "1 to 1024 characters"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": "a" * 1025}, "stop", "1 to 1024 characters"),
    ({"stop_token_ids": [304]}, "stop_token_ids", "0 to 303"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "got -1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above max_tokens=4"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "got 21"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream: true"),
    ({"stream": "yes"}, "stream", "got 'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"tightwire": {"comm": 1}}, "tightwire.comm", "got 1"),
    ({"model": 5}, "model", "got 5"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", ""]}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "must be a string"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string"),
    ({"prompt": ["a", 5]}, "prompt", "must be all strings"),
    ({"prompt": [1, "a"]}, "prompt", "must be all strings"),
    ({"prompt": [True]}, "prompt", "must be all strings"),
    ({"prompt": [False]}, "prompt", "must be all strings"),
    ({"prompt": [1.5]}, "prompt", "must be all strings"),
    ({"prompt": [[1], "a"]}, "prompt", "must be all strings"),
    ({"prompt": [304]}, "prompt", "token id 304; the vocabulary"),
    ({"prompt": [1, -1]}, "prompt", "token id -1"),
    ({"prompt": [[5], [10**50]]}, "prompt", "a huge id"),
    ({"prompt": "a" * 256}, "prompt", "256 tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "got 21"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "got True"),
    ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"messages": []}, "prompt", "prompt is missing"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hi"}, "messages", "got 'Hi'"),
    ({"messages": ["Hi"]}, "messages[0]", "got 'Hi'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role", "got 'wizard'"),
    ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content", "a string or a list"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "a string or a list"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "a string or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text only"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "malformed part"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", "malformed part"),
    ({"messages": [USER, {**USER, "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function", "missing"),
    ({"messages": [{**USER, "function_call": {"name": "f"}}]}, "messages[0].function_call", "not supported"),
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    ({"messages": [USER], "logprobs": 1}, "logprobs", "got 1"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21"),
    ({"messages": [USER], "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "differ"),
    ({"messages": [{**USER, "content": "a" * 300}]}, "messages", "context of 256"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"messages": [USER], "modalities": ["audio"]}, "modalities", "text only"),
    ({"prompt": "a"}, "messages", "messages is missing"),
]
# Bodies that are no JSON object that could be looked at.
BAD_BYTES: list[tuple[bytes, str]] = [
    (b"", "empty"),
    (b"{", "not valid JSON"),
    (b"{'prompt': 1}", "not valid JSON"),
    (b"[]", "must be a JSON object, got []"),
    (b'"a"', "must be a JSON object, got 'a'"),
    (b"null", "must be a JSON object"),
    (b'{"prompt": "a", "temperature": NaN}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": Infinity}', "not valid JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "not valid JSON"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "not valid JSON"),
    (b'{"prompt": "\\ud800"}', "not valid JSON"),
    (b'{"prompt": "\\udc00\\ud800 text"}', "not valid JSON"),
    (b'{"prompt": "\xff"}', "not valid JSON"),
    (b'{"prompt": "a\x00b"}', "not valid JSON"),
    (b'{"prompt": "a\\u0000b"}', "NUL"),
    (b'{"prompt": "a", "stop": ["x", "\\u0000"]}', "NUL"),
    (b'{"prompt": "a", "logit_bias": {"\\u0000": 1}}', "NUL"),
    (b'{"\\u0000": 1}', "NUL"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}", "nested too deeply; at most 256"),
    (b'{"prompt": ' + b"[" * 200 + b"1" + b"]" * 200 + b"}", "must be all strings"),
    (b'{"prompt": ' + b'{"a":' * 100_000, "nested too deeply"),
]


async def _refused(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("fields", "param", "message"), BAD_SAMPLING)
async def test_invalid_sampling_is_rejected_in_both_dialects(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    for path, text in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [USER]})):
        error = await _refused(client, path, {**text, **fields})
        assert error["param"] == param
        assert message in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(("body", "param", "message"), BAD_COMPLETIONS)
async def test_invalid_completions_are_rejected(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str, message: str
) -> None:
    error = await _refused(client, "/v1/completions", body)
    assert error["param"] == param
    assert message in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS)
async def test_invalid_chats_are_rejected(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str, message: str
) -> None:
    error = await _refused(client, "/v1/chat/completions", body)
    assert error["param"] == param
    assert message in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(("content", "message"), BAD_BYTES)
async def test_invalid_json_is_rejected(client: httpx.AsyncClient, content: bytes, message: str) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/v1/completions", "/tokenize"):
        response = await client.post(path, content=content, headers=headers)
        assert response.status_code == 400, response.text
        if path == "/v1/completions":
            assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
async def test_content_type_must_be_json(client: httpx.AsyncClient, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = await client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415
    assert "Content-Type: application/json" in response.json()["error"]["message"]


async def test_whole_numbers_may_be_written_as_floats(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = b'"max_tokens": 4.0, "n": 2e0, "seed": 7.0, "top_k": 40.0, "stop_token_ids": [2.0]'
    for path, text in (("/v1/completions", b'"prompt": "a"'), ("/v1/chat/completions", b'"messages": [%b]')):
        content = b"{" + text.replace(b"%b", json.dumps(USER).encode()) + b", " + fields + b"}"
        response = await client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text
    answers = [request.params for request in engine.submitted]
    assert [(p.max_tokens, p.seed, p.top_k, p.stop_token_ids) for p in answers] == [
        (4, 7, 40, (2,)),
        (4, 8, 40, (2,)),
    ] * 2
    assert all(type(p.max_tokens) is type(p.top_k) is int for p in answers)


async def test_a_byte_order_mark_is_skipped(client: httpx.AsyncClient) -> None:
    content, headers = b'\xef\xbb\xbf{"prompt": "a"}', {"content-type": "application/json"}
    assert (await client.post("/v1/completions", content=content, headers=headers)).status_code == 200


async def test_compressed_bodies_are_rejected(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"content-encoding": "gzip"})
    assert response.status_code == 415


async def test_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    for path, text in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        response = await client.post(path, json={**text, "model": "gpt-5"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "'tiny'" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [304]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
async def test_invalid_tokenize_bodies_are_rejected(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert (await _refused(client, path, body))["param"] == param


async def test_escaped_backslash_before_u0000_is_not_a_nul(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await client.post("/v1/completions", content=rb'{"prompt": "\\u0000"}', headers=headers)
    assert response.status_code == 200
    assert bytes(engine.submitted[0].prompt_token_ids) == rb"\u0000"


async def test_every_invalid_field_is_named(client: httpx.AsyncClient) -> None:
    error = await _refused(client, "/v1/completions", {"prompt": "a", "n": 0, "top_p": 7, "min_p": 9})
    assert error["param"] == "top_p"
    assert "and problems in min_p, n" in error["message"]
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    error = await _refused(client, "/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert error["message"] == "messages[0].tool_calls[0].function.arguments: input should be a valid string, got {}"


def test_no_field_is_in_two_tables() -> None:
    assert not IGNORED_FIELDS & set(UNSUPPORTED_FIELDS)
    for body, own in ((CompletionBody, set()), (ChatBody, {"tools", "tool_choice", "reasoning_effort"})):
        assert set(body.model_fields) & (IGNORED_FIELDS | set(UNSUPPORTED_FIELDS)) == own


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS))
def test_unsupported_fields_accept_only_neutral_values(name: str) -> None:
    neutral, _ = UNSUPPORTED_FIELDS[name]
    for value in neutral:
        assert check_fields({"prompt": "a", name: value}, CompletionBody).prompt == ["a"]
    with pytest.raises(ApiError, match="not supported"):
        check_fields({"prompt": "a", name: ["something"]}, CompletionBody)


def test_a_neutral_number_may_be_a_float_but_no_boolean() -> None:
    assert check_fields({"prompt": "a", "best_of": 1.0}, CompletionBody).n == 1
    with pytest.raises(ApiError, match="best_of=True is not supported: use n"):
        check_fields({"prompt": "a", "best_of": True}, CompletionBody)


def test_tool_messages_keep_what_templates_use() -> None:
    message = Message.model_validate({"role": "tool", "content": "4", "tool_call_id": "x"})
    assert message.to_template() == {"role": "tool", "content": "4", "tool_call_id": "x"}


def test_every_sampling_parameter_is_taken_from_the_body() -> None:
    sent = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": 1.0},
        "logprobs": 2,
        "prompt_logprobs": 1,
        "stop_token_ids": [1, 2],
        "min_tokens": 1,
        "ignore_eos": True,
        "allowed_token_ids": [3, 4],
        "bad_words": [],
    }
    # The grammar is made from other fields.
    assert sent.keys() == set(SamplingParams.__struct_fields__) - {"grammar"}
    params = check_fields({"prompt": "a", **sent}, CompletionBody).sampling_params(grammar="g")
    assert msgspec.json.decode(msgspec.json.encode(params)) == sent | {"grammar": "g"}
    plain = check_fields({"prompt": "a"}, CompletionBody).sampling_params(max_tokens=16, seed=0, grammar="")
    assert plain == SamplingParams(max_tokens=16)
