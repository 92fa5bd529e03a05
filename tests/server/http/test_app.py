"""The whole application over a scripted engine: routes, dialects, health, key, limits."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from helpers.server.fake_engine import INFO, FakeEngine, app_for, byte_tokenizer, client_of, says

from tightwire import __version__
from tightwire.model.text.tokenizer import BOS, CHAT_TEMPLATE
from tightwire.server.config.serve import HttpOptions
from tightwire.server.ipc.engine_client import EngineState, Phase
from tightwire.server.ipc.messages import AddRequest, Output

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def _ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


async def test_chat_answer_has_openais_shape(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await _ask(client, "/v1/chat/completions", **CHAT)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"] == "tightwire-tp2-native-bfloat16-bfloat16-sums"
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello, world.", "refusal": None},
        "finish_reason": "stop",
        "logprobs": None,
    }
    prompt = byte_tokenizer().encode_chat([{"role": "user", "content": "Hi"}])
    assert engine.submitted[0].prompt_token_ids == prompt
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 14,
        "total_tokens": len(prompt) + 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert engine.submitted[0].params.max_tokens == INFO.plan.max_model_len - len(prompt)


async def test_chat_stream_has_role_then_text_then_finish_then_usage(client: httpx.AsyncClient) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    events = _events(await client.post("/v1/chat/completions", json=body))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    first, *middle, finish, usage = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == "Hello, world."
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 14
    assert all(event["usage"] is None for event in events[:-1])
    assert [event["choices"][0]["finish_reason"] for event in [first, *middle]] == [None] * (len(middle) + 1)


async def test_stream_without_usage_has_no_usage_field(client: httpx.AsyncClient) -> None:
    events = _events(await client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    assert all("usage" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_completion_of_several_prompts_and_n(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [*f"{bytes(request.prompt_token_ids).decode()}!".encode()]
    answer = await _ask(client, "/v1/completions", prompt=["ab", "c"], n=2, seed=7, max_tokens=20)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "ab!", "length"),
        (1, "ab!", "length"),
        (2, "c!", "length"),
        (3, "c!", "length"),
    ]
    assert [request.params.seed for request in engine.submitted] == [7, 8, 7, 8]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_prompt_forms_are_equal(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any) -> None:
    answer = await _ask(client, "/v1/completions", prompt=prompt, max_tokens=3)
    assert engine.submitted[0].prompt_token_ids == [97, 98]
    assert answer["choices"][0]["text"] == "Hel"


async def test_completion_logprobs_and_echo(client: httpx.AsyncClient) -> None:
    answer = await _ask(client, "/v1/completions", prompt="ab", echo=True, logprobs=1, max_tokens=2)
    [choice] = answer["choices"]
    assert choice["text"] == "abHe"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "H", "e"],
        "token_logprobs": [None, -1.0, -1.0, -1.0],
        "top_logprobs": [None, {"c": -0.5, "b": -1.0}, {"I": -0.5, "H": -1.0}, {"f": -0.5, "e": -1.0}],
        "text_offset": [0, 1, 2, 3],
    }


async def test_prompt_can_be_scored_without_an_answer(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await _ask(client, "/v1/completions", prompt="abc", echo=True, logprobs=0, max_tokens=0)
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert engine.submitted[0].params.max_tokens == 1


async def test_streamed_echo_and_logprobs_equal_the_whole(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("né 🙂 ok")
    body: dict[str, Any] = {"prompt": "é", "echo": True, "logprobs": 2, "max_tokens": 50}
    [whole] = (await _ask(client, "/v1/completions", **body))["choices"]
    events = _events(await client.post("/v1/completions", json={**body, "stream": True}))
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == "éné 🙂 ok"
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][key]]
        assert streamed == whole["logprobs"][key]
    assert whole["logprobs"]["tokens"][:3] == ["bytes:\\xc3", "bytes:\\xa9", "n"]
    assert whole["logprobs"]["text_offset"][:5] == [0, 0, 1, 2, 2]


async def test_chat_logprobs(client: httpx.AsyncClient) -> None:
    answer = await _ask(client, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2, max_tokens=1)
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "H",
                "logprob": -1.0,
                "bytes": [72],
                "top_logprobs": [
                    {"token": "I", "logprob": -0.5, "bytes": [73]},
                    {"token": "H", "logprob": -1.0, "bytes": [72]},
                ],
            }
        ],
        "refusal": None,
    }
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_prompt_logprobs_in_vllms_form(client: httpx.AsyncClient) -> None:
    answer = await _ask(client, "/v1/completions", prompt="ab", prompt_logprobs=1, max_tokens=1)
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        },
    ]
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("backwards", [False, True])
async def test_a_prompt_of_several_answers_is_scored_once(backwards: bool) -> None:
    class Engine(FakeEngine):
        """Its outputs may come in the order of the last choice first."""

        async def submit(self, requests: Sequence[AddRequest]) -> AsyncGenerator[Output, None]:
            async for output in super().submit(requests[::-1] if backwards else requests):
                yield output

    one, several = FakeEngine(), Engine()
    body: dict[str, Any] = {"prompt": ["ab", "cde"], "prompt_logprobs": 1, "echo": True, "logprobs": 1, "max_tokens": 3}
    async with client_of(app_for(one)) as client:
        expected = (await _ask(client, "/v1/completions", **body))["choices"]
    async with client_of(app_for(several)) as client:
        choices = (await _ask(client, "/v1/completions", **body, n=3, stop="Hel"))["choices"]
        streamed = body | {"n": 3, "stream": True, "prompt_logprobs": None}
        events = (await client.post("/v1/completions", json=streamed)).text
    params = {request.id: request.params.prompt_logprobs for request in several.submitted[:6]}
    assert sorted(params.values(), key=str) == [1, 1, None, None, None, None]
    for choice in choices:
        [like] = [each for each in expected if each["prompt_logprobs"] == choice["prompt_logprobs"]]
        assert like["index"] == choice["index"] // 3 and choice["text"] == like["text"][: -len("Hel")]
        assert choice["logprobs"] == like["logprobs"]
    chunks = [json.loads(line[6:])["choices"][0] for line in events.splitlines() if line.startswith("data: {")]
    for index in range(6):
        of_choice = [chunk["logprobs"] for chunk in chunks if chunk["index"] == index and chunk["logprobs"]]
        scores = [score for logprobs in of_choice for score in logprobs["token_logprobs"]]
        assert scores == expected[index // 3]["logprobs"]["token_logprobs"]


async def test_cached_prompt_tokens_are_counted_once_per_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 5
    answer = await _ask(client, "/v1/completions", prompt=["seven..", "another"], n=2, max_tokens=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 10}


async def test_cache_salt_reaches_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await _ask(client, "/v1/completions", prompt="a", cache_salt="mine", max_tokens=1)
    await _ask(client, "/v1/chat/completions", **CHAT, max_tokens=1)
    assert [request.cache_salt for request in engine.submitted] == ["mine", ""]


@pytest.mark.parametrize("salt", ["", "a" * 257, 5])
async def test_invalid_cache_salt_is_rejected(client: httpx.AsyncClient, salt: Any) -> None:
    response = await client.post("/v1/completions", json={"prompt": "a", "cache_salt": salt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cache_salt"


async def test_stop_string_ends_text_and_cancels_the_sequence(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    answer = await _ask(client, "/v1/completions", prompt="a", stop=["wor", "zzz"], max_tokens=50, n=2)
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("Hello, ", "stop")] * 2
    assert answer["usage"]["completion_tokens"] == 2 * len("Hello, wor")
    assert engine.cancelled == {request.id for request in engine.submitted}
    assert not engine.live


async def test_stop_string_is_kept_on_request(client: httpx.AsyncClient) -> None:
    body = {"prompt": "a", "stop": "wor", "include_stop_str_in_output": True, "max_tokens": 50}
    answer = await _ask(client, "/v1/completions", **body)
    assert answer["choices"][0]["text"] == "Hello, wor"


async def test_stop_string_waits_for_min_tokens(client: httpx.AsyncClient) -> None:
    answer = await _ask(client, "/v1/completions", prompt="a", stop="l", min_tokens=4, max_tokens=50)
    assert answer["choices"][0]["text"] == "Hello, wor"


async def test_stop_token_is_text_only_on_request(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": "a", "stop_token_ids": [ord("w")], "max_tokens": 50}
    answer = await _ask(client, "/v1/completions", **body)
    kept = await _ask(client, "/v1/completions", **body, include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "Hello, "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert kept["choices"][0]["text"] == "Hello, w"


async def test_sampling_parameters_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    body = {**asked, "logit_bias": {"5": -100}, "stop_token_ids": [7], "max_tokens": 4}
    await _ask(client, "/v1/chat/completions", **CHAT, **body)
    params = engine.submitted[0].params
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.logit_bias == {5: -100.0}
    assert params.stop_token_ids == (7,)
    assert params.max_tokens == 4


async def test_neutral_openai_fields_are_accepted(client: httpx.AsyncClient) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "stop": None,
        "seed": None,
    }
    await _ask(client, "/v1/chat/completions", **CHAT, **harmless)


async def test_message_parts_and_roles(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    await _ask(client, "/v1/chat/completions", messages=messages)
    prompt = byte_tokenizer().decode(engine.submitted[0].prompt_token_ids, False)
    assert "<|start|>system\nbe brief<|end|>" in prompt
    assert "<|start|>user\none\ntwo<|end|>" in prompt


@pytest.mark.parametrize(
    "refusal", [{"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}], ids=("field", "part")
)
async def test_a_refusal_of_the_assistant_is_its_text(
    client: httpx.AsyncClient, engine: FakeEngine, refusal: dict[str, Any]
) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": None, **refusal}, *CHAT["messages"]]
    await _ask(client, "/v1/chat/completions", messages=messages)
    assert "<|start|>assistant\nNo.<|end|>" in byte_tokenizer().decode(engine.submitted[0].prompt_token_ids, False)


async def test_models(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    one = (await client.get("/v1/models/tiny")).json()
    assert listed == {"object": "list", "data": [one], "first_id": "tiny", "last_id": "tiny", "has_more": False}
    assert one["id"] == "tiny" and one["object"] == "model" and one["max_model_len"] == 256
    unknown = await client.get("/v1/models/some/other")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"


async def test_other_names_of_the_model(engine: FakeEngine) -> None:
    async with client_of(app_for(engine, info=replace(INFO, other_names=("small", "a/b")))) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/a/b")).json()
        answer = await client.post("/v1/completions", json={"prompt": "a", "model": "small"})
        unknown = await client.post("/v1/completions", json={"prompt": "a", "model": "large"})
    assert [card["id"] for card in listed] == ["tiny", "small", "a/b"] and listed[2] == one
    assert answer.json()["model"] == "tiny"
    assert "'tiny', 'small', 'a/b'" in unknown.json()["error"]["message"]


async def test_version_and_tokenizer_info(client: httpx.AsyncClient) -> None:
    """In vLLM's form; lm-eval's remote tokenizer reads it."""
    assert (await client.get("/version")).json() == {"version": __version__}
    info = (await client.get("/tokenizer_info")).json()
    assert info == {
        "eos_token": None,
        "bos_token": BOS,
        "pad_token": None,
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
async def test_sampling_defaults_of_the_model(engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
    info = replace(INFO, sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 50})
    async with client_of(app_for(engine, info=info)) as client:
        answer = (await client.post(path, json=body)).json()
        await client.post(path, json={**body, "temperature": 0.5, "top_k": 0})
    first, second = (request.params for request in engine.submitted)
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.6, 0.9, 50, 0.0)
    assert (second.temperature, second.top_p, second.top_k) == (0.5, 0.9, 0)
    assert answer.get("temperature", 0.6) == 0.6  # the Responses API repeats it


async def test_an_answer_without_a_limit_has_the_models(engine: FakeEngine) -> None:
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [CHAT, CHAT | {"max_completion_tokens": 9}, CHAT | {"max_tokens": 9}],
        "/v1/responses": [{"input": "a"}, {"input": "a", "max_output_tokens": 9}],
        "/v1/messages": [CHAT | {"max_tokens": 9}],
        "/v1/completions": [{"prompt": "a"}],
    }
    async with client_of(app_for(engine, info=replace(INFO, sampling={"max_new_tokens": 7}))) as client:
        for path, asked in bodies.items():
            for body in asked:
                assert (await client.post(path, json=body)).status_code == 200
    assert [request.params.max_tokens for request in engine.submitted] == [7, 9, 9, 7, 9, 9, 16]
    async with client_of(app_for(engine, info=replace(INFO, sampling={"max_new_tokens": 1000}))) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert engine.submitted[-1].params.max_tokens == 256 - len(engine.submitted[-1].prompt_token_ids)


async def test_variables_of_the_chat_template(engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"enable_thinking": False}}
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ add_generation_prompt }}"
    async with client_of(app_for(engine, template=template)) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        body["chat_template_kwargs"] = {"add_generation_prompt": False}
        refused = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert byte_tokenizer().decode(engine.submitted[0].prompt_token_ids) == "a False True"
    assert (
        refused["param"] == "chat_template_kwargs.add_generation_prompt" and "set by the server" in refused["message"]
    )


MESSAGES = CHAT | {"max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", CHAT, ""),
        ("/v1/chat/completions", CHAT | {"reasoning_effort": "none"}, "none False"),
        ("/v1/chat/completions", CHAT | {"reasoning_effort": "minimal"}, "minimal True"),
        (
            "/v1/chat/completions",
            CHAT | {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "low False",
        ),
        ("/v1/responses", {"input": "Hi"}, ""),
        ("/v1/responses", {"input": "Hi", "reasoning": {"summary": "auto"}}, ""),
        ("/v1/responses", {"input": "Hi", "reasoning": {"effort": "xhigh"}}, "xhigh True"),
        ("/v1/messages", MESSAGES, ""),
        (
            "/v1/messages",
            MESSAGES | {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            "none False",
        ),
        ("/v1/messages", MESSAGES | {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "high True"),
        ("/v1/messages", MESSAGES | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "max True"),
        ("/v1/messages", MESSAGES | {"output_config": {"effort": "low"}}, "low True"),
    ],
)
async def test_reasoning_is_told_to_the_chat_template(
    engine: FakeEngine, path: str, body: dict[str, Any], told: str
) -> None:
    template = "{{ messages[0].content }} {{ reasoning_effort }} {{ enable_thinking }}"
    async with client_of(app_for(engine, template=template)) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200 and "x-tightwire-ignored" not in response.headers
    assert byte_tokenizer().decode(engine.submitted[0].prompt_token_ids).split() == ["Hi", *told.split()]
    if path == "/v1/responses":
        assert response.json()["reasoning"] == {"effort": told.split()[0] if told else None, "summary": None}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "much"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": 1}}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "much"}}, "output_config.effort"),
    ],
)
async def test_an_unknown_effort_is_refused(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"input": "Hi"} if path == "/v1/responses" else MESSAGES
    error = (await client.post(path, json=body | fields)).json()["error"]
    assert error["param"] == param and "'xhigh'" in error["message"]


async def test_tokenize_and_detokenize(client: httpx.AsyncClient) -> None:
    tokens = await _ask(client, "/tokenize", prompt="né", return_token_strs=True)
    assert tokens == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [110, 195, 169],
        "token_strs": ["n", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert (await _ask(client, "/detokenize", tokens=tokens["tokens"])) == {"prompt": "né"}
    chat = await _ask(client, "/tokenize", **CHAT)
    assert chat["tokens"] == byte_tokenizer().encode_chat(CHAT["messages"])


async def test_comm_report_is_the_difference_over_the_request(client: httpx.AsyncClient) -> None:
    await _ask(client, "/v1/completions", prompt="a", max_tokens=3)
    answer = await _ask(client, "/v1/completions", prompt="a", max_tokens=3, tightwire={"comm": True})
    comm = answer["tightwire"]["comm"]
    # The last step of the request is still being delivered when its counters are read.
    assert comm["shared"] is True
    assert comm["counters"][0]["calls"] == 3 * 4 and comm["bytes_sent"] == 3 * 1000
    assert comm["exact_bytes"] == 3 * 1500 and comm["saved_bytes"] == 3 * 500
    assert comm["exact_bytes"] == sum(counter["exact_bytes"] for counter in comm["counters"])
    assert 0 < comm["ttft"]["comm_share"] < 1 and comm["decode"]["comm_seconds"] > 0
    body = {"prompt": "a", "stream": True, "tightwire": {"comm": True}}
    events = _events(await client.post("/v1/completions", json=body))
    assert events[-1]["choices"] == [] and events[-1]["tightwire"]["comm"]["bytes_sent"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_tells_how_much_of_its_prompt_is_computed(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.chunk_tokens, engine.num_cached_tokens = 8, 3
    body = {"prompt": "a" * 20} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a" * 20}]}
    asked = {**body, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    events = _events(await client.post(path, json={**asked, "tightwire": {"progress": True, "timing": True}}))
    for index in (0, 1):
        own = [event for event in events if event["choices"] and event["choices"][0]["index"] == index]
        told = [event["tightwire"]["progress"] for event in own if "tightwire" in event]
        total = len(engine.submitted[0].prompt_token_ids)
        assert len(told) > 2 and all("tightwire" in event for event in own[: len(told)])
        assert [each["computed"] for each in told] == [*range(8, total - 3, 8), total - 3]
        assert all(each["prompt_tokens"] == total and each["cached"] == 3 for each in told)
        assert all(event["choices"][0]["finish_reason"] is None and event["usage"] is None for event in own[:2])
        choice = own[0]["choices"][0]
        assert choice["delta"] == {} if "chat" in path else choice["text"] == ""
    timing = events[-1]["tightwire"]["timing"]
    assert sum(part or 0.0 for name, part in timing.items() if name != "ttft_s") == pytest.approx(timing["ttft_s"])
    plain = _events(await client.post(path, json=asked))
    assert not any("tightwire" in event for event in plain) and not engine.submitted[-1].progress
    assert [event["choices"] for event in events if "tightwire" not in event or not event["choices"]] == [
        event["choices"] for event in plain
    ]


async def test_while_loading_only_liveness_and_metrics_respond(engine: FakeEngine) -> None:
    unknown = {"kernels": "", "activations": ""}
    engine.state = EngineState(phase=Phase.LOADING, reason="rank 0: weights 40%")
    async with client_of(app_for(engine, loaded=False)) as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        for path in ("/health", "/health/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json() == {"status": "loading", "reason": "rank 0: weights 40%", **unknown}
        for response in (await client.get("/v1/models"), await client.post("/v1/chat/completions", json=CHAT)):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "service_unavailable_error"
            assert "weights 40%" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) > 0


async def test_an_engine_without_its_tokenizer_is_not_ready(engine: FakeEngine) -> None:
    unknown = {"kernels": "", "activations": ""}
    async with client_of(app_for(engine, loaded=False)) as client:
        assert (await client.get("/health")).json() == {"status": "loading", "reason": "tokenizer", **unknown}


async def test_draining_rejects_new_work_and_still_reports_status(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.state = EngineState(phase=Phase.DRAINING)
    assert (await client.get("/health/ready")).json()["status"] == "draining"
    assert (await client.get("/v1/models")).status_code == 200
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503 and "shutting down" in response.json()["error"]["message"]
    assert engine.submitted == []


async def test_key_guards_everything_but_health_and_metrics(engine: FakeEngine) -> None:
    app = app_for(engine, http=HttpOptions(api_key="sésame"))
    async with client_of(app) as client:
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200, path
        closed = [
            "/v1/models",
            "/comm",
            "/comm/trace",
            "/docs",
            "/openapi.json",
            "/nowhere",
            "/health/",
            "/metrics/x",
            "/",
        ]
        for path in closed:
            response = await client.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        bad: list[str] = ["Bearer wrong", "Basic s", "Bearer", "Bearer sésame2", "sésame"]
        for value in bad:
            response = await client.get("/v1/models", headers=[(b"authorization", value.encode())])
            assert response.status_code == 401, value
        good = [(b"authorization", "Bearer sésame".encode())]
        assert (await client.get("/v1/models", headers=good)).status_code == 200
        assert (await client.get("/openapi.json", headers=good)).json()["security"] == [{"key": []}]


async def test_request_id_is_echoed_or_made(client: httpx.AsyncClient) -> None:
    given = await client.get("/health", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = [(await client.get("/nowhere", headers={"X-Request-Id": "a b"})).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2 and all(len(id_) == 32 for id_ in made)


async def test_queue_full_is_429(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.full = True
    for body in (CHAT, {**CHAT, "stream": True}):
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "rate_limit_error"


async def test_more_sequences_than_the_queue_holds_is_400(engine: FakeEngine) -> None:
    async with client_of(app_for(engine, http=HttpOptions(max_queued_requests=4))) as client:
        response = await client.post("/v1/completions", json={"prompt": ["a"] * 3, "n": 2})
        assert response.status_code == 400
        assert "6 sequences" in response.json()["error"]["message"]


async def test_chat_without_template_is_400(engine: FakeEngine) -> None:
    async with client_of(app_for(engine, chat=False)) as client:
        for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", CHAT)):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "no_chat_template"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_body_limit_counts_what_arrives(engine: FakeEngine) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(1000):
            yield b"a" * 100_000

    async with client_of(app_for(engine)) as client:
        headers = {"content-type": "application/json"}
        for content in (b'{"prompt": "' + b"a" * (4 << 20) + b'"}', endless()):
            response = await client.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_routes_that_do_not_exist(client: httpx.AsyncClient) -> None:
    routes = (await client.get("/openapi.json")).json()["paths"]
    listed = ", ".join(route for route in routes if route.startswith("/v1/"))
    there = f"; this server has {listed}, and others that GET /openapi.json lists"
    for path, hint in {
        "/v1/moderations": there,
        "/v1/images/generations": there,
        "/v1/conversations": there,
        "/version/": "; leave out the slash at the end: /version",
        "/versoin": "; did you mean '/version'?",
        "/v1/completions/": "; leave out the slash at the end: /v1/completions",
        "/chat/completions": "; did you mean /v1/chat/completions? The base URL of OpenAI's clients ends in /v1",
        "/models/": "; did you mean /v1/models? The base URL of OpenAI's clients ends in /v1",
        "/v1/v1/messages": "; did you mean /v1/messages? Leave /v1 out of the base URL",
        "/v1/chat/completion": "; did you mean '/v1/chat/completions'?",
    }.items():
        unknown = (await client.post(path)).json()["error"]
        assert unknown["message"] == "there is no such route" + hint
        assert unknown["code"] == "route_not_found"
    wrong = await client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
