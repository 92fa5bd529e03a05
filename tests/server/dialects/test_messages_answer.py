"""POST /v1/messages with Anthropic's client: answers, every event of a stream, tools, structured output, errors."""

import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from helpers.server.add_tool import SCHEMA, TOOL_TEMPLATE, WRITTEN
from helpers.server.fake_engine import FakeEngine, app_for, byte_tokenizer, client_of, planned, says, serve
from helpers.server.sampling_engine import SamplingEngine
from jsonschema_rs import validator_for
from pydantic import TypeAdapter

from tightwire.server.config.http import HttpOptions
from tightwire.server.ipc.engine_client import EngineState, Phase

if TYPE_CHECKING:  # collecting tests imports it in every worker, which takes two seconds of each
    from anthropic import Anthropic

KEY = "secret"
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
HI: Any = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": HI}


def body(**fields: Any) -> Any:
    return BODY | fields


@cache
def event_type() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine()
    with serve(app_for(engine, info=planned(max_model_len=4096), http=HttpOptions(api_key=KEY))) as url:
        yield url, engine


@pytest.fixture
def engine(served: tuple[str, FakeEngine]) -> FakeEngine:
    """The served engine, reset to its defaults."""
    vars(served[1]).update(vars(FakeEngine()))
    return served[1]


@pytest.fixture
def api(served: tuple[str, FakeEngine], engine: FakeEngine) -> "Iterator[Anthropic]":
    from anthropic import Anthropic

    with Anthropic(base_url=served[0], api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def raw(served: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0], timeout=60, headers={"x-api-key": KEY}) as client:
        yield client


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the client's types."""
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            assert event_type().validate_python(event).type == event["type"]
        events.append(event)
    return events


def prompt_of(engine: FakeEngine) -> str:
    return byte_tokenizer().decode(engine.submitted[-1].prompt_token_ids)


def test_answer(api: "Anthropic", engine: FakeEngine) -> None:
    from anthropic.types import Message

    engine.num_cached_tokens = 4
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    answer = api.messages.create(
        **BODY, system=system, metadata={"user_id": "me"}, extra_body={"temperature": 0.5, "top_k": 3}
    )
    Message.model_validate(answer.model_dump(), strict=True)
    [block] = answer.content
    assert block.type == "text" and block.text == "Hello, world."
    assert (answer.stop_reason, answer.stop_sequence, answer.model, answer.role) == (
        *("end_turn", None, "tiny", "assistant"),
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    ids = byte_tokenizer().encode_chat(messages)
    assert engine.submitted[0].prompt_token_ids == ids
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (len(ids) - 4, 4, 14)
    assert (engine.submitted[0].params.temperature, engine.submitted[0].params.top_k) == (0.5, 3)
    assert answer._request_id


def test_stream_has_every_event_in_order(raw: httpx.Client) -> None:
    whole = raw.post("/v1/messages", json=BODY).json()
    events = events_of(raw.post("/v1/messages", json=body(stream=True)))
    assert [event["type"] for event in events] == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * 13,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start, end = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None} and end["usage"] == whole["usage"]


def test_the_clients_stream_helper_reads_it(api: "Anthropic") -> None:
    with api.messages.stream(**BODY) as stream:
        assert "".join(stream.text_stream) == "Hello, world."
        assert stream.get_final_message().stop_reason == "end_turn"


def test_stop_reasons(api: "Anthropic", engine: FakeEngine) -> None:
    answer = api.messages.create(**BODY, stop_sequences=["x", ", w"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ", w")
    assert answer.content[0].type == "text" and answer.content[0].text == "Hello"
    with api.messages.stream(**BODY, stop_sequences=[", w"]) as stream:
        assert stream.get_final_message().stop_sequence == ", w"
    assert api.messages.create(**body(max_tokens=2)).stop_reason == "max_tokens"
    engine.script = lambda request: [65] * 10_000
    answer = api.messages.create(**body(max_tokens=64_000))
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.input_tokens + answer.usage.output_tokens == 4096


def test_an_answer_without_text_has_no_content(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says("")
    assert raw.post("/v1/messages", json=BODY).json()["content"] == []
    kinds = [event["type"] for event in events_of(raw.post("/v1/messages", json=body(stream=True)))]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


def test_blocks_become_messages(api: "Anthropic", engine: FakeEngine) -> None:
    messages: Any = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "Two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "secretly", "signature": "s"},
                {"type": "text", "text": "Calling."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "11"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "22"}]},
                {"type": "tool_result", "tool_use_id": "t3", "is_error": True},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    api.messages.create(model="tiny", max_tokens=9, messages=messages)
    prompt = prompt_of(engine)
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]' in prompt
    assert "One\nTwo" in prompt and "secretly" not in prompt
    places = [prompt.index(text) for text in ("Two", "Calling.", "11", "22", "Go on.")]
    assert places == sorted(places)


def test_a_last_message_of_the_assistant_is_continued(api: "Anthropic", engine: FakeEngine) -> None:
    api.messages.create(model="tiny", max_tokens=9, messages=[*HI, {"role": "assistant", "content": "The answer is"}])
    assert prompt_of(engine).endswith("The answer is")


def test_calls_that_the_model_writes(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says(WRITTEN)
    whole = raw.post("/v1/messages", json=body(tools=[ADD])).json()
    text, first, second = whole["content"]
    assert whole["stop_reason"] == "tool_use" and text == {"type": "text", "text": "Well. "}
    assert (first["type"], first["name"], first["input"], second["input"]) == ("tool_use", "add", {"a": 12}, {})
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]
    events = events_of(raw.post("/v1/messages", json=body(tools=[ADD], stream=True)))
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use", "tool_use"] and starts[1]["input"] == {}
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 1]
    assert {piece["type"] for piece in pieces} == {"input_json_delta"}
    assert json.loads("".join(piece["partial_json"] for piece in pieces)) == {"a": 12}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_arguments_that_are_not_json_are_kept(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says('<tool_call>{"name": "add", "arguments": {"a": twelve}}</tool_call>')
    [call] = raw.post("/v1/messages", json=body(tools=[ADD])).json()["content"]
    assert call["input"] == {"INVALID_JSON": '{"a": twelve}'}


def test_a_call_without_arguments_has_an_empty_input(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says('<tool_call>{"name": "add", "arguments": null}</tool_call>')
    [call] = raw.post("/v1/messages", json=body(tools=[ADD])).json()["content"]
    assert call["input"] == {}


def test_an_answer_with_half_a_surrogate_pair_is_an_answer(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says(r'{"arguments": {"a": "\ud83d"}, "name": "add"}')
    [call] = raw.post("/v1/messages", json=body(tools=[ADD])).json()["content"]
    assert call["input"] == {"INVALID_JSON": r'{"a": "\ud83d"}'}


def test_a_tool_of_the_type_null_is_a_tool(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says(WRITTEN)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert raw.post(path, json=body(tools=[ADD | {"type": None}])).status_code == 200
    bad = raw.post("/v1/messages", json=body(messages=[{"role": "user", "content": [{"type": None}]}])).json()
    assert "messages[0].content[0] is of the type None; supported: text" in bad["error"]["message"]


def test_other_tools_are_ignored_and_named(raw: httpx.Client) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}]
    response = raw.post("/v1/messages?beta=true", json=BODY | {"tools": tools, "thinking": {"type": "adaptive"}})
    assert response.status_code == 200
    assert response.headers["x-tightwire-ignored"] == "tools[0].web_search_20250305, tools[1].bash_20250124"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}], ids=str)
async def test_demanded_calls_follow_the_schema(choice: dict[str, Any]) -> None:
    from anthropic.types import Message

    pytest.importorskip("llguidance")
    tools = [{"type": "web_search_20250305", "name": "web_search"}, ADD]
    asked = BODY | {"tools": tools, "tool_choice": choice | {"disable_parallel_tool_use": True}, "seed": 3}
    async with client_of(app_for(SamplingEngine(), template=TOOL_TEMPLATE)) as client:
        answer = Message.model_validate((await client.post("/v1/messages", json=asked)).json())
        events = events_of(await client.post("/v1/messages", json=asked | {"stream": True}))
    [call] = answer.content
    assert answer.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "add"
    validator_for(SCHEMA).validate(call.input)
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == call.input


async def test_output_config_format() -> None:
    pytest.importorskip("llguidance")
    asked = BODY | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}, "seed": 4}
    async with client_of(app_for(SamplingEngine())) as client:
        response = await client.post("/v1/messages", json=asked)
    [block] = response.json()["content"]
    validator_for(SCHEMA).validate(json.loads(block["text"]))


def test_models(api: "Anthropic") -> None:
    [listed] = page = api.models.list(limit=5)
    assert api.models.retrieve("tiny") == listed and not page.has_more and page.first_id == page.last_id == "tiny"
    assert (listed.type, listed.id, listed.display_name) == ("model", "tiny", "tiny")
    assert listed.created_at.timestamp() == 1_700_000_000


def test_count_tokens(api: "Anthropic", engine: FakeEngine) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": HI, "system": "Be kind.", "tools": [ADD]}
    counted = api.messages.count_tokens(**fields)
    assert counted.input_tokens == api.messages.create(**fields, max_tokens=9).usage.input_tokens
    assert api.messages.count_tokens(model="tiny", messages=HI).input_tokens < counted.input_tokens


def test_refusals_of_count_tokens_name_the_fields_of_this_api(raw: httpx.Client) -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}, ADD | {"input_schema": {"type": "string"}}]
    counted = raw.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HI, "tools": tools}).json()
    answered = raw.post("/v1/messages", json=body(tools=tools)).json()
    assert "tools[1].input_schema.type is 'string'" in counted["error"]["message"]
    assert counted["error"] == answered["error"]
    assert raw.post("/v1/messages/count_tokens", json=body(stream=True, container="c")).status_code == 200
    long = raw.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "x" * 5000}]}).json()
    assert long["input_tokens"] > 5000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": [{"role": "user", "content": []}]}, "messages is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: input should be a valid list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0] is of the type 'image'",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0] is of the type 'document'",
        ),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "content[0] is 'text', not an object; supported: text"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"system": [{"type": "image"}]}, "system[0] is of the type 'image'; supported: text"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "the prompt has"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [ADD]}, "not among the tools: add"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
        ({"mcp_servers": [{"type": "url"}]}, "no MCP servers"),
        (
            {
                "tools": [
                    {"type": "bash_20250124", "name": "bash"},
                    ADD | {"input_schema": {"type": "object", "not": {}}},
                ],
                "tool_choice": {"type": "any"},
            },
            "tools[1].input_schema is not supported",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            "output_config.format.schema is not supported",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": -(2**63)}}}},
            "output_config.format.schema is not supported: it has the number -9223372036854775808",
        ),
    ],
    ids=str,
)
def test_refusals_are_anthropics(api: "Anthropic", fields: dict[str, Any], message: str) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as bad:
        api.post("/v1/messages", body=BODY | fields, cast_to=object)
    error: Any = bad.value.body
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert message in error["error"]["message"]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}], ids=str)
def test_a_refused_thread_lets_clients_send_the_whole_conversation(raw: httpx.Client, thread: dict[str, str]) -> None:
    # A continued thread has the new messages alone, so an answer to them would be an answer to half a conversation.
    refused = raw.post("/v1/messages", json=BODY | {"thread": thread})
    error = refused.json()["error"]
    assert (
        refused.status_code == 400 and error["param"] == "thread" and "send the whole conversation" in error["message"]
    )
    assert error["details"] == {"error_code": "thread_unsupported_request"}  # what the helpers of the clients read


def test_exceptions_are_the_ones_programs_catch(api: "Anthropic", raw: httpx.Client, engine: FakeEngine) -> None:
    import anthropic
    from anthropic import Anthropic

    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        api.with_options(api_key="wrong").messages.create(**BODY)
    bearer = Anthropic(base_url=api.base_url, auth_token=KEY, api_key=None, max_retries=0)
    assert bearer.messages.create(**BODY).role == "assistant"
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        api.messages.create(**body(model="claude-opus"))
    engine.full = True
    with pytest.raises(anthropic.RateLimitError):
        api.messages.create(**BODY)
    engine.full, engine.gives_up = False, "error"
    with pytest.raises(anthropic.InternalServerError, match="out of blocks"):
        api.messages.create(**BODY)
    engine.gives_up, engine.state = None, EngineState(phase=Phase.LOADING, reason="weights")
    loading = raw.post("/v1/messages", json=BODY)
    assert loading.status_code == 503 and loading.json()["error"]["type"] == "overloaded_error"
    for missing in (raw.get("/v1/messages"), raw.post("/v1/messages/batches", json={})):
        assert missing.json()["type"] == "error" and missing.status_code in (404, 405)


def test_engine_death_in_a_stream_raises_in_the_client(api: "Anthropic", engine: FakeEngine) -> None:
    import anthropic

    engine.dies_after = 3
    with pytest.raises(anthropic.APIStatusError, match="rank 1 was killed"):
        list(api.messages.create(**BODY, stream=True))
