"""POST /v1/responses with OpenAI's client: answers, every event of a stream, tools, structured output, errors."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from helpers.server.add_tool import SCHEMA, TOOL_TEMPLATE, WRITTEN
from helpers.server.fake_engine import FakeEngine, app_for, byte_tokenizer, client_of, planned, says, serve
from helpers.server.sampling_engine import SamplingEngine
from jsonschema_rs import validator_for
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tightwire.server.config.http import HttpOptions
from tightwire.server.dialects.responses_answer import ResponsesDialect

ADD: dict[str, Any] = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, FakeEngine]]:
    engine = FakeEngine()
    with serve(app_for(engine, info=planned(max_model_len=4096))) as url:
        yield url, engine


@pytest.fixture
def engine(served: tuple[str, FakeEngine]) -> FakeEngine:
    """The served engine, reset to its defaults."""
    vars(served[1]).update(vars(FakeEngine()))
    return served[1]


@pytest.fixture
def api(served: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def raw(served: tuple[str, FakeEngine], engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0], timeout=60) as client:
        yield client


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the client's types. Numbers run from 0; the last frame is [DONE]."""
    *frames, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        assert EVENT.validate_python(event).type == event["type"]
        events.append(event)
    return events


def prompt_of(engine: FakeEngine) -> str:
    return byte_tokenizer().decode(engine.submitted[-1].prompt_token_ids)


def test_answer(api: OpenAI, engine: FakeEngine) -> None:
    answer = api.responses.create(
        model="tiny", input="Hi", instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, store=False
    )
    Response.model_validate(answer.model_dump(), strict=True)
    assert answer.output_text == "Hello, world." and answer.status == "completed" and answer.store is False  # type: ignore[attr-defined]
    assert answer.metadata == {"a": "b"} and answer.instructions == "Be kind." and answer.temperature == 0.5
    assert answer.usage and answer.usage.output_tokens == 14
    assert answer.usage.total_tokens == answer.usage.input_tokens + 14
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert engine.submitted[0].prompt_token_ids == byte_tokenizer().encode_chat(messages)
    assert engine.submitted[0].params.temperature == 0.5


def test_stream_has_every_event_in_order(raw: httpx.Client) -> None:
    whole = raw.post("/v1/responses", json={"input": "Hi"}).json()
    events = events_of(raw.post("/v1/responses", json={"input": "Hi", "stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 13,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == "Hello, world."
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    last = events[-1]["response"]
    assert events[-2]["item"] == last["output"][0]
    unlike = {"id", "created_at", "completed_at", "output"}
    assert {name: last[name] for name in last if name not in unlike} == {
        name: whole[name] for name in whole if name not in unlike
    }
    assert last["output"][0]["content"] == whole["output"][0]["content"]


def test_the_clients_stream_helper_reads_it(api: OpenAI) -> None:
    with api.responses.stream(model="tiny", input="Hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == stream.get_final_response().output_text == "Hello, world."


def test_an_answer_without_text_is_an_empty_message(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says("")
    assert raw.post("/v1/responses", json={"input": "Hi"}).json()["output"][0]["content"][0]["text"] == ""
    events = events_of(raw.post("/v1/responses", json={"input": "Hi", "stream": True}))
    assert len(events) == 8 and events[-1]["response"]["output"][0]["status"] == "completed"


def test_items_become_messages(api: OpenAI, engine: FakeEngine) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "11"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "22"}]},
    ]
    api.responses.create(model="tiny", input=items)
    prompt = prompt_of(engine)
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]' in prompt
    assert prompt.index("Be brief.") < prompt.index("One") < prompt.index("11") < prompt.index("22")
    first = api.responses.create(model="tiny", input="Hi")
    answered = [item.model_dump() for item in first.output]
    api.responses.create(model="tiny", input=[{"role": "user", "content": "Hi"}, *answered, *items[:2]])  # type: ignore[list-item]
    assert "Hello, world." in prompt_of(engine)


def test_a_call_with_half_a_character_comes_back_as_text(raw: httpx.Client, engine: FakeEngine) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": "\\ud800"}'}
    items = [{"role": "user", "content": "Hi"}, call, {"type": "function_call_output", "call_id": "c", "output": "1"}]
    assert raw.post("/v1/responses", json={"input": items}).status_code == 200
    assert json.dumps(call["arguments"]) in prompt_of(engine)


def test_an_answer_with_half_a_surrogate_pair_is_an_answer(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says(r'{"arguments": {"a": "\ud83d"}, "name": "add"}')
    asked = {"input": "Hi", "tools": [ADD]}
    whole = raw.post("/v1/responses", json=asked).json()
    last = events_of(raw.post("/v1/responses", json=asked | {"stream": True}))[-1]["response"]
    for response in (whole, last):
        assert [call["arguments"] for call in response["output"]] == [r'{"a": "\ud83d"}']


def test_an_answer_that_cannot_be_encoded_ends_with_an_error(
    raw: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResponsesDialect, "pieces", lambda self, delta: ["\ud83d"])
    *_, error, done, rest = raw.post("/v1/responses", json={"input": "Hi", "stream": True}).text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert (done, rest) == ("data: [DONE]", "")


def test_max_output_tokens_makes_an_incomplete_answer(raw: httpx.Client) -> None:
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 3}
    answer = raw.post("/v1/responses", json=body).json()
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None
    last = events_of(raw.post("/v1/responses", json=body | {"stream": True}))[-1]
    assert last["type"] == "response.incomplete" and last["response"]["output"][0]["content"][0]["text"] == "Hel"


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ("[add(a=1), add(a=2)]", ["completed", "completed"]),
        ('Well. <tool_call>{"name": "add", "arguments": {"a": 12}}', ["completed", "completed"]),
        ('Well. <tool_call>{"name": "add", "arguments": {"a": 12', ["completed", "incomplete"]),
        ('<tool_call>[{"name": "add", "arguments": {"a": 12}}, {"name": "add', ["completed", "incomplete"]),
    ],
)
def test_only_what_was_cut_off_is_incomplete(
    raw: httpx.Client, engine: FakeEngine, text: str, statuses: list[str]
) -> None:
    engine.script = says(text + "x" * 9)
    asked = {"input": "Hi", "tools": [ADD], "max_output_tokens": len(text)}
    whole = raw.post("/v1/responses", json=asked).json()
    last = events_of(raw.post("/v1/responses", json=asked | {"stream": True}))[-1]["response"]
    for response in (whole, last):
        assert response["status"] == "incomplete"
        assert [item["status"] for item in response["output"]] == statuses


def test_calls_that_the_model_writes(raw: httpx.Client, engine: FakeEngine) -> None:
    engine.script = says(WRITTEN)
    body: dict[str, Any] = {"input": "H", "tools": [ADD], "instructions": None}
    whole = raw.post("/v1/responses", json=body).json()
    events = events_of(raw.post("/v1/responses", json=body | {"stream": True}))
    last = events[-1]["response"]
    for response in (whole, last):
        message, first, second = response["output"]
        assert message["content"][0]["text"] == "Well. "
        assert (first["name"], first["arguments"], first["status"]) == ("add", '{"a": 12}', "completed")
        assert second["arguments"] == "{}" and first["call_id"] != second["call_id"]
        assert response["tools"] == [ADD]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("arguments") for item in added] == [None, "", ""]
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas if event["output_index"] == 1) == '{"a": 12}'


def test_other_tools_are_ignored_and_named(raw: httpx.Client, engine: FakeEngine) -> None:
    tools = [{"type": "web_search"}, {"type": "custom", "name": "sh", "format": {"type": "text"}}]
    response = raw.post("/v1/responses", json={"input": "Hi", "tools": tools, "reasoning": {"effort": "low"}})
    assert response.status_code == 200 and response.json()["tools"] == []
    assert response.headers["x-tightwire-ignored"] == "tools[0].web_search, tools[1].custom"
    assert prompt_of(engine) == byte_tokenizer().decode(
        byte_tokenizer().encode_chat([{"role": "user", "content": "Hi"}])
    )


async def test_strict_fields_refuses_other_tools() -> None:
    async with client_of(app_for(FakeEngine(), http=HttpOptions(strict_fields=True))) as client:
        response = await client.post("/v1/responses", json={"input": "Hi", "tools": [{"type": "web_search"}]})
    assert response.status_code == 400 and "tools[0].web_search" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "add"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    ],
    ids=str,
)
async def test_required_calls_follow_the_schema(choice: Any) -> None:
    pytest.importorskip("llguidance")
    other = ADD | {"name": "other", "parameters": {"type": "object", "not": {}}}
    tools = [ADD, other] if isinstance(choice, dict) else [{"type": "web_search"}, ADD]
    body = {"input": "Hi", "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
    answers = []
    async with client_of(app_for(SamplingEngine(), template=TOOL_TEMPLATE)) as client:
        answers.append((await client.post("/v1/responses", json=body)).json())
        answers.append(events_of(await client.post("/v1/responses", json=body | {"stream": True}))[-1]["response"])
    for answer in answers:
        [call] = Response.model_validate(answer).output
        assert call.type == "function_call" and call.name == "add"
        validator_for(SCHEMA).validate(json.loads(call.arguments))
        assert answer["tool_choice"] == choice
    assert answers[0]["output"][0]["arguments"] == answers[1]["output"][0]["arguments"]


@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, {"type": "json_schema", "name": "x", "schema": SCHEMA}], ids=str
)
async def test_text_format(form: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    body = {"input": "Hi", "text": {"format": form, "verbosity": "low"}, "seed": 4, "max_output_tokens": 150}
    async with client_of(app_for(SamplingEngine())) as client:
        answer = Response.model_validate((await client.post("/v1/responses", json=body)).json())
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)
    assert answer.status == "completed" or form["type"] == "json_object"
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == form["type"]


def test_logprobs(raw: httpx.Client) -> None:
    body = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 2}
    [item] = raw.post("/v1/responses", json=body).json()["output"]
    assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["H", "e"]
    events = events_of(raw.post("/v1/responses", json=body | {"stream": True}))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == item["content"][0]["logprobs"]


@pytest.mark.parametrize("held", ["", "<tool"], ids=("", "held"))
@pytest.mark.parametrize(
    ("call", "before", "between"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": "done"}}</tool_call>', "Well <tool. ", " "),
        ('<tool_call>{"arguments": {"a": " done"}, "name": "add"}</tool_call>', "", "\ndone"),
        ('```json\n{"arguments": {"a": " done"}, "name": "add"}\n```', "", "\n "),
    ],
    ids=("in order", "as a whole", "fence"),
)
def test_logprobs_of_text_beside_calls_are_those_of_its_tokens(
    raw: httpx.Client, engine: FakeEngine, call: str, before: str, between: str, held: str
) -> None:
    engine.script = says(before + call + between + held + " done")
    asked = {"input": "Hi", "tools": [ADD], "include": ["message.output_text.logprobs"]}
    whole = raw.post("/v1/responses", json=asked).json()
    events = events_of(raw.post("/v1/responses", json=asked | {"stream": True}))
    for output in (whole["output"], events[-1]["response"]["output"]):
        texts = [item["content"][0] for item in output if item["type"] == "message"]
        assert texts and texts[-1]["text"] == between + held + " done"
        for text in texts:
            assert "".join(entry["token"] for entry in text["logprobs"]) == text["text"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all("".join(entry["token"] for entry in event["logprobs"]) == event["delta"] for event in deltas)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "c"}, "conversation", "stores no responses"),
        ({"background": True}, "background", "use stream"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": None}, "input", "is missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'input_image'"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content", "valid list"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "'robot'"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "has no message"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens=5000 exceed the model's 4096"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_tokens": 3}, "max_tokens", "use max_output_tokens"),
        ({"input": "x" * 5000}, "input", "the prompt has"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "is of the type 'web_search'; supported: none"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tools": [{}]}, "tools[0].type", "is missing"),
        ({"tools": ["add"]}, "tools[0]", "is 'add', not an object"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "needs it"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema",
            "text.format.schema is not supported",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": -(2**63)}}}},
            "text.format.schema",
            "text.format.schema is not supported: it has the number -9223372036854775808",
        ),
        (
            {
                "tools": [{"type": "web_search"}, ADD | {"parameters": {"type": "object", "not": {}}}],
                "tool_choice": "required",
            },
            "tools[1].parameters",
            "tools[1].parameters is not supported",
        ),
        ({"model": "gpt-5"}, "model", "does not exist"),
    ],
    ids=str,
)
def test_refusals_name_the_field_of_this_api(
    raw: httpx.Client, fields: dict[str, Any], param: str, message: str
) -> None:
    response = raw.post("/v1/responses", json={"input": "Hi"} | fields)
    error = response.json()["error"]
    assert response.status_code == (404 if "model" in fields else 400)
    assert error["param"] == param and message in error["message"], error


def test_nothing_is_stored(api: OpenAI) -> None:
    for call in (api.responses.retrieve, api.responses.cancel, api.responses.input_items.list, api.responses.delete):
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            call("resp_1")
    with pytest.raises(openai.NotFoundError, match="send the whole conversation to POST /v1/responses"):
        api.responses.compact(model="tiny", input="Hi")


def test_input_tokens(api: OpenAI, raw: httpx.Client) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": "Hi", "instructions": "Be kind.", "tools": [ADD]}
    counted = api.responses.input_tokens.count(**fields)
    assert counted.object == "response.input_tokens"
    usage = api.responses.create(**fields, max_output_tokens=9).usage
    assert usage is not None and counted.input_tokens == usage.input_tokens
    assert api.responses.input_tokens.count(model="tiny", input="Hi").input_tokens < counted.input_tokens
    bad = [ADD | {"parameters": {"type": "string"}}]
    error = raw.post("/v1/responses/input_tokens", json={"input": "Hi", "tools": bad}).json()["error"]
    assert error["param"] == "tools[0].parameters.type"


def test_engine_death_in_a_stream_raises_in_the_client(api: OpenAI, raw: httpx.Client, engine: FakeEngine) -> None:
    engine.dies_after = 3
    seen: Any = None
    with pytest.raises(openai.APIError, match="rank 1 was killed"):
        for event in api.responses.create(model="tiny", input="Hi", stream=True):
            seen = event
    assert seen.type == "response.failed" and "rank 1" in seen.response.error.message
    vars(engine).update(vars(FakeEngine(dies_after=3)))
    events = events_of(raw.post("/v1/responses", json={"input": "Hi", "stream": True}))
    assert events[-1]["type"] == "error" and events[-1]["error"]["code"] == "unavailable"
