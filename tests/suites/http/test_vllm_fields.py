"""vLLM's extensions through HTTP, with the real engine and sampler: bans, special tokens, prompts left open, usage."""

import json
from itertools import cycle, product
from typing import Any

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, byte_tokenizer, client_of, says
from helpers.server.sampling_engine import SamplingEngine

from tightwire.model.text.tokenizer import END_OF_TURN_ID

USER = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [USER]},
}
ABC = [ord(letter) for letter in "abc"]
ENGINES = [{}, *({"speculation": kind} for kind in ("ngram", "suffix", "draft")), {"plan_ahead": True}]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "top_k": 2},
    {"temperature": 1.5, "top_p": 0.9, "frequency_penalty": 0.5},
]


def open_client(engine: FakeEngine) -> httpx.AsyncClient:
    return client_of(app_for(engine))


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of the answer; of a stream, all chunks joined."""
    response = await client.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()["choices"]
    choices: dict[int, dict[str, Any]] = {}
    for event in events_of(response):
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "text": ""})
            choice["text"] += piece.get("text") or piece.get("delta", {}).get("content") or ""
            choice["finish_reason"] = piece["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    return response.json()["error"]


# Every engine with every sampling, in turns through the two paths.
@pytest.mark.parametrize(
    ("engine", "sampling", "path"),
    [(*pair, path) for pair, path in zip(product(ENGINES, SAMPLINGS), cycle(BODIES), strict=False)],
    ids=str,
)
async def test_only_allowed_tokens_and_no_bad_words(
    engine: dict[str, Any], sampling: dict[str, Any], path: str
) -> None:
    """n, seeds, streams, logprobs, drafts and steps planned ahead give the same text."""
    num_tokens = 12 if sampling["temperature"] else 24  # greedy texts are slow to vary
    fields = {**sampling, "allowed_token_ids": [*ABC, *ABC], "seed": 5, "n": 3, "max_tokens": num_tokens}
    words = {"bad_words": ["ab", "cc", "bbb", "zebra"]}
    async with open_client(SamplingEngine(**engine)) as client:
        free = [text_of(choice) for choice in await ask(client, path, **fields)]
        banned = [text_of(choice) for choice in await ask(client, path, **fields, **words)]
        streamed = [text_of(choice) for choice in await ask(client, path, **fields, **words, stream=True)]
        logprobs = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
        scored = [text_of(choice) for choice in await ask(client, path, **fields, **words, **logprobs)]
    async with open_client(SamplingEngine()) as client:
        plain = [text_of(choice) for choice in await ask(client, path, **fields, **words)]
    assert all(len(text) == num_tokens and set(text) <= set("abc") for text in free + banned)
    assert any("ab" in text for text in free)
    assert not any(word in text for word in words["bad_words"] for text in banned)
    assert banned == streamed == scored == plain


async def test_a_bad_word_may_begin_in_the_prompt() -> None:
    """As in vLLM, only generated tokens count."""
    fields = {"prompt": "a", "allowed_token_ids": [ord("b")], "bad_words": ["ab"], "max_tokens": 3}
    async with open_client(SamplingEngine()) as client:
        assert text_of((await ask(client, "/v1/completions", **fields))[0]) == "bbb"


async def test_words_that_leave_no_token_in_the_middle_are_400() -> None:
    fields = {"allowed_token_ids": [ord("b")], "bad_words": ["bbb"], "max_tokens": 5}
    async with open_client(SamplingEngine()) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", **fields})
        stream = await client.post("/v1/completions", json={"prompt": "a", **fields, "stream": True})
    assert "ban every next token" in error_of(response)["message"]
    assert "ban every next token" in events_of(stream)[-1]["error"]["message"]
    assert [event["choices"][0]["text"] for event in events_of(stream)[:-1]] == ["b", "b"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"allowed_token_ids": [304]}, "allowed_token_ids", "token id 304; the vocabulary of 'tiny' is 0 to 303"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "got -1"),
        ({"allowed_token_ids": [10**30]}, "allowed_token_ids[0]", "less than"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids[0]", "got '5'"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids[0]", "got True"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids[0]", "got 1.5"),
        ({"allowed_token_ids": 5}, "allowed_token_ids", "valid list"),
        ({"allowed_token_ids": {"5": 1}}, "allowed_token_ids", "valid list"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids", "ban all 1 allowed_token_ids"),
        ({"allowed_token_ids": [END_OF_TURN_ID], "min_tokens": 1}, "allowed_token_ids", "leave no token"),
        (
            {"allowed_token_ids": [97, 98, 98], "stop_token_ids": [97], "min_tokens": 1, "bad_words": ["b"]},
            "allowed_token_ids",
            "ban all 2",
        ),
        ({"bad_words": "ab"}, "bad_words", "valid list"),
        ({"bad_words": [5]}, "bad_words[0]", "got 5"),
        ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
        ({"bad_words": [None]}, "bad_words[0]", "got None"),
        ({"bad_words": ["a" * 257]}, "bad_words[0]", "at most 256"),
        ({"bad_words": ["a"] * 1025}, "bad_words", "at most 1024"),
        ({"skip_special_tokens": 0}, "skip_special_tokens", "got 0"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens", "got 'no'"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "got 1"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
            "stream_options.continuous_usage_stats",
            "got 1",
        ),
    ],
    ids=str,
)
async def test_bad_values_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(await client.post(path, json={**BODIES[path], **fields}))
    assert (error["param"], engine.submitted) == (param, [])
    assert message in error["message"]


async def test_harmless_values_are_accepted(client: httpx.AsyncClient) -> None:
    for fields in (
        {"allowed_token_ids": None, "bad_words": None, "skip_special_tokens": None, "return_tokens_as_token_ids": None},
        {"bad_words": []},
        {"bad_words": [" ", "\n", "  é", "a"] * 200},
        {"allowed_token_ids": list(range(304))},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ):
        await ask(client, "/v1/completions", **fields)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_are_text_on_request(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, stream: bool
) -> None:
    engine.script = lambda request: [*b"a", 256, *b"b", 303, END_OF_TURN_ID]
    for fields, text in (
        ({}, "ab w303"),
        ({"skip_special_tokens": True}, "ab w303"),
        ({"skip_special_tokens": False}, "a<|bos|>b w303"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|bos|>b w303<|end|>"),
        ({"skip_special_tokens": False, "stop": "<|bos"}, "a"),
        ({"skip_special_tokens": False, "ignore_eos": True}, "a<|bos|>b w303<|end|>"),
    ):
        [choice] = await ask(client, path, **fields, stream=stream, max_tokens=20)
        assert text_of(choice) == text


async def test_echo_keeps_special_tokens_too(client: httpx.AsyncClient) -> None:
    fields = {"prompt": [256, 97], "echo": True, "max_tokens": 0, "logprobs": 0}
    [plain] = await ask(client, "/v1/completions", **fields)
    [special] = await ask(client, "/v1/completions", **fields, skip_special_tokens=False)
    assert (plain["text"], plain["logprobs"]["text_offset"]) == ("a", [0, 0])
    assert (special["text"], special["logprobs"]["text_offset"]) == ("<|bos|>a", [0, len("<|bos|>")])


@pytest.mark.parametrize("skip", [True, False])
async def test_offsets_of_an_echo_count_special_tokens_that_the_prompt_has(
    client: httpx.AsyncClient, skip: bool
) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": 0, "skip_special_tokens": skip}
    [choice] = await ask(client, "/v1/completions", **fields, prompt="<|bos|>é<|end|>a")
    assert choice["text"] == "<|bos|>é<|end|>a"
    assert choice["logprobs"]["text_offset"] == [0, 7, 7, 8, 15]  # both tokens of é begin where it does


async def test_tokens_as_token_ids(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("é")
    fields = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    [choice] = await ask(client, "/v1/completions", **fields, logprobs=1)
    assert choice["logprobs"]["tokens"] == ["token_id:195", "token_id:169"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:196": -0.5, "token_id:195": -1.0}
    [choice] = await ask(client, "/v1/chat/completions", **fields, logprobs=True, top_logprobs=1)
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == (
        "token_id:195",
        [195],
        "token_id:196",
    )
    [choice] = await ask(client, "/v1/chat/completions", **fields)
    assert choice["logprobs"] is None


@pytest.mark.parametrize("path", BODIES)
async def test_ids_of_the_answers_tokens(client: httpx.AsyncClient, engine: FakeEngine, path: str) -> None:
    """As TRL's rollout worker asks: one for each of the log-probabilities, with the token that ended the answer."""
    engine.script = says("é")
    fields = {"return_token_ids": True, "n": 2, "max_tokens": 5}
    more = {"logprobs": 0, "echo": True} if path == "/v1/completions" else {}
    choices = await ask(client, path, **fields, **more)
    assert [choice["token_ids"] for choice in choices] == [[195, 169, END_OF_TURN_ID]] * 2
    [plain, _] = await ask(client, path, n=2)
    assert "token_ids" not in plain
    [choice, _] = await ask(client, "/v1/completions", **fields, logprobs=0)
    assert len(choice["logprobs"]["token_logprobs"]) == 3
    error = error_of(await client.post(path, json={**BODIES[path], "return_token_ids": True, "stream": True}))
    assert error["param"] == "return_token_ids"


@pytest.mark.parametrize("path", BODIES)
async def test_usage_in_every_chunk(client: httpx.AsyncClient, path: str) -> None:
    async def events(**options: bool) -> list[dict[str, Any]]:
        body = {**BODIES[path], "n": 2, "max_tokens": 5, "stream": True, "stream_options": options}
        return events_of(await client.post(path, json=body))

    *chunks, last = await events(include_usage=True, continuous_usage_stats=True)
    whole = (await client.post(path, json={**BODIES[path], "n": 2, "max_tokens": 5})).json()["usage"]
    assert last["usage"] == whole and whole["completion_tokens"] == 10
    for index in range(2):
        usages = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        begins = [0, 1] if path == "/v1/chat/completions" else [1]
        assert counts == [*begins, 2, 3, 4, 5, 5]  # a choice's own tokens; the last chunk has only the finish reason
        assert {usage["prompt_tokens"] for usage in usages} == {whole["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    assert all("usage" not in event for event in await events(continuous_usage_stats=True))  # as in vLLM


OPEN: list[tuple[dict[str, Any], str, str]] = [
    ({}, "Hi<|end|><|start|>assistant\n", "assistant"),
    ({"add_generation_prompt": True}, "Hi<|end|><|start|>assistant\n", "assistant"),
    ({"add_generation_prompt": False}, "Hi<|end|>", "user"),
    ({"continue_final_message": False, "add_generation_prompt": False}, "Hi<|end|>", "user"),
    ({"continue_final_message": True}, "Hi", "user"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "Hi", "user"),
    (
        {"messages": [USER, {"role": "assistant", "content": "The wire "}], "continue_final_message": True},
        "Hi<|end|><|start|>assistant\nThe wire ",
        "assistant",
    ),
]


@pytest.mark.parametrize(("fields", "end", "role"), OPEN, ids=str)
async def test_how_a_chat_prompt_ends(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], end: str, role: str
) -> None:
    [choice] = await ask(client, "/v1/chat/completions", **fields)
    prompt = engine.submitted[0].prompt_token_ids
    assert byte_tokenizer().decode(prompt, False) == f"<|bos|><|start|>user\n{end}"
    assert choice["message"]["role"] == role
    stream = await client.post("/v1/chat/completions", json={"messages": [USER], **fields, "stream": True})
    assert events_of(stream)[0]["choices"][0]["delta"]["role"] == role
    tokens = await client.post("/tokenize", json={"messages": [USER], **fields})
    assert tokens.json()["tokens"] == prompt


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "leave one of them",
        ),
        ({"continue_final_message": 1}, "continue_final_message", "got 1"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt", "got 'yes'"),
    ],
    ids=str,
)
async def test_a_prompt_ends_in_one_way(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str, message: str
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        error = error_of(await client.post(path, json={"messages": [USER], **fields}))
        assert error["param"] == param and message in error["message"]


async def test_timing_has_the_drafts_of_the_request() -> None:
    fields = {"prompt": "Hi", "temperature": 0, "max_tokens": 60, "allowed_token_ids": ABC[:1]}
    for speculation in ("suffix", "draft", "none"):
        async with open_client(SamplingEngine(speculation=speculation)) as client:
            answer = await client.post("/v1/completions", json={**fields, "tightwire": {"timing": True}})
        extra = answer.json()["tightwire"]
        assert ("drafts" in extra) == (speculation != "none")
        if "drafts" in extra:
            drafts = extra["drafts"]
            assert drafts["tokens"] >= drafts["accepted"] > 0 and drafts["steps"] > 0
            assert drafts["mean_length"] == drafts["accepted"] / drafts["steps"]
