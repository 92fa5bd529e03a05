"""Tools through HTTP: required and named calls with the real sampler, calls that a model writes, the prompt, errors."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from helpers.server.add_tool import SCHEMA, TOOL_TEMPLATE, WRITTEN
from helpers.server.fake_engine import INFO, FakeEngine, app_for, byte_tokenizer, client_of, planned, says
from helpers.server.sampling_engine import SamplingEngine
from jsonschema_rs import validator_for
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tightwire.model.text.tokenizer import CHAT_TEMPLATE, END_OF_TURN_ID

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/place"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "string", "maxLength": 5}},
}
SCHEMAS = {"weather": CITY, "add": SCHEMA}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
USER = {"role": "user", "content": "Hi"}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def post(
    engine: FakeEngine, *, template: str = TOOL_TEMPLATE, special: Sequence[str] = (), **fields: Any
) -> httpx.Response:
    info = INFO if isinstance(engine, SamplingEngine) else planned(max_model_len=4096)
    async with client_of(app_for(engine, info=info, template=template, special=special)) as client:
        return await client.post(
            "/v1/chat/completions", json={"messages": [USER], "max_tokens": 180, "tools": TOOLS} | fields
        )


async def whole(engine: FakeEngine, **fields: Any) -> Any:
    response = await post(engine, **fields)
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json(), strict=True).choices


async def streamed(engine: FakeEngine, **fields: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason of the only choice."""
    response = await post(engine, stream=True, **fields)
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    content, calls, reason = "", [], None
    for event in events:
        choice = ChatCompletionChunk.model_validate_json(event).choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            assert part.function is not None
            if part.id:
                assert part.function.name and part.type == "function"
                calls.append((part.function.name, ""))
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + (part.function.arguments or "")
    return content, calls, reason


@pytest.mark.parametrize("parallel", [False, True])
async def test_required_calls_follow_the_schemas(parallel: bool) -> None:
    pytest.importorskip("llguidance")
    fields = {"tool_choice": "required", "parallel_tool_calls": parallel, "seed": 7, "temperature": 1.2}
    choices = await whole(SamplingEngine(), n=4, **fields)
    ended = [choice for choice in choices if choice.finish_reason != "length"]
    assert ended or parallel
    for choice in ended:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert parallel or len(choice.message.tool_calls) == 1
        for call in choice.message.tool_calls:
            validator_for(SCHEMAS[call.function.name]).validate(json.loads(call.function.arguments))
    for speculation in ("none", "draft"):
        content, calls, _ = await streamed(SamplingEngine(speculation=speculation), **fields)
        assert content == "" and calls == [
            (call.function.name, call.function.arguments) for call in choices[0].message.tool_calls
        ]


DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
MARK = {"$ref": "#/$defs/mark"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "https://host/mark.json", "$ref": "#/$defs/mark", "$defs": {"mark": {"const": {"a": 1}}}},
        {"$ref": "#/$defs/mark", "$defs": {"mark": {"const": {"a": 1}}}, **DRAFT_7},
        {"type": "object", "properties": {"a": {"const": MARK}}, "required": ["a"], "additionalProperties": False},
    ],
    ids=["id", "draft 7", "constant"],
)
async def test_required_calls_follow_schemas_with_an_id_and_texts_like_references(schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "mark", "parameters": schema}}]
    fields = {"tool_choice": "required", "parallel_tool_calls": False}
    (answer,) = await whole(SamplingEngine(), tools=tools, **fields)
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments) == ({"a": MARK} if "properties" in schema else {"a": 1})


async def test_only_allowed_tools_are_called_and_in_the_prompt() -> None:
    pytest.importorskip("llguidance")
    engine = SamplingEngine()
    (answer,) = await whole(engine, tool_choice=allowed("required", "weather", "sub"), seed=1)
    assert {call.function.name for call in answer.message.tool_calls} == {"weather"}
    prompt = byte_tokenizer().decode(engine.submitted[0].prompt_token_ids)
    assert "weather" in prompt and "add" not in prompt
    (answer,) = await whole(FakeEngine(script=says(WRITTEN)), tool_choice=allowed("auto", "weather"))
    assert answer.message.tool_calls is None  # of add


async def test_a_named_tool_is_called() -> None:
    pytest.importorskip("llguidance")
    choice = {"type": "function", "function": {"name": "weather"}}
    (answer,) = await whole(SamplingEngine(), tool_choice=choice, seed=1, response_format={"type": "json_object"})
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "weather" and call.id.startswith("call_")
    validator_for(CITY).validate(json.loads(call.function.arguments))
    assert await streamed(SamplingEngine(), tool_choice=choice, seed=1) == (
        "",
        [("weather", call.function.arguments)],
        "tool_calls",
    )


async def test_without_parallel_calls_an_answer_has_the_first() -> None:
    calls, one = [("add", '{"a": 12}')], {"parallel_tool_calls": False}
    (answer,) = await whole(FakeEngine(script=says(WRITTEN)), **one)
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls] == calls
    assert await streamed(FakeEngine(script=says(WRITTEN)), **one) == ("Well. ", calls, "tool_calls")
    body = {"messages": [USER], "max_tokens": 180, "tools": [{"name": "add", "input_schema": SCHEMA}]}
    choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    async with client_of(app_for(FakeEngine(script=says(WRITTEN)), info=planned(max_model_len=4096))) as client:
        message = (await client.post("/v1/messages", json=body | choice)).json()
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]


async def test_calls_that_the_model_writes() -> None:
    expected = [("add", '{"a": 12}'), ("add", "{}")]
    (answer,) = await whole(FakeEngine(script=says(WRITTEN)))
    assert answer.message.content == "Well. " and answer.finish_reason == "tool_calls"
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls] == expected
    assert len({call.id for call in answer.message.tool_calls}) == 2
    assert await streamed(FakeEngine(script=says(WRITTEN))) == ("Well. ", expected, "tool_calls")


MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
# As the templates of Mistral models print calls and results.
MISTRAL_TEMPLATE = """{{ tools }}{% for message in messages %}{% if message.tool_calls is defined %}
{%- for call in message.tool_calls %}{% if call.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments|tojson }}{% endfor %}
{%- elif message.role == 'tool' %}{{ '[' + message.tool_call_id + ']' + message.content }}
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""


BARS = ("<|tool_call|>", "<|/tool_call|>")  # Granite 3's and Phi-4-mini's


def says_tokens(text: str, special: Sequence[str]) -> FakeEngine:
    """Says the text in the tokens of a tokenizer that has these special tokens."""
    ids = byte_tokenizer(special=special).encode(text, add_special_tokens=False)
    return FakeEngine(script=lambda request: [*ids, END_OF_TURN_ID])


@pytest.mark.parametrize(
    ("special", "text"),
    [
        (MISTRAL, 'Well.[TOOL_CALLS]add[ARGS]{"a": 12}[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{}'),
        (
            MISTRAL,
            'Well.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 12}}, {"name": "add", "arguments": {}, "id": "a1b2c3d4e"}]',
        ),
        (BARS, 'Well.<|tool_call|>[{"name": "add", "arguments": {"a": 12}}, {"name": "add", "arguments": {}}]'),
        (BARS, 'Well.<|tool_call|>[{"name":"add","arguments":{"a": 12}},{"name":"add","parameters":{}}]<|/tool_call|>'),
    ],
)
async def test_calls_after_special_tokens_are_found(special: Sequence[str], text: str) -> None:
    engine = says_tokens(text, special)
    calls = [("add", '{"a": 12}'), ("add", "{}")]
    (answer,) = await whole(engine, special=special)
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Well."
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()] == calls
    assert await streamed(engine, special=special) == ("Well.", calls, "tool_calls")
    (answer,) = await whole(engine, special=special, tool_choice="none")
    assert special[0] not in (answer.message.content or "")


@pytest.mark.parametrize("special", [(), ("<function_calls>", "</function_calls>")])
async def test_lines_of_calls_in_every_api(special: Sequence[str]) -> None:
    engine = says_tokens("Well.\n<function_calls>add(a=12)\nadd()</function_calls>", special)
    calls = [("add", '{"a": 12}'), ("add", "{}")]
    (answer,) = await whole(engine, special=special)
    assert [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()] == calls
    assert await streamed(engine, special=special) == ("Well.\n", calls, "tool_calls")
    own = [{"name": "add", "parameters": SCHEMA, "input_schema": SCHEMA}]
    body = {"input": "Hi", "max_output_tokens": 180, "tools": [own[0] | {"type": "function"}]}
    async with client_of(app_for(engine, info=planned(max_model_len=4096), special=special)) as client:
        response = (await client.post("/v1/responses", json=body)).json()
        message = (await client.post("/v1/messages", json={"messages": [USER], "max_tokens": 180, "tools": own})).json()
    assert [(item["name"], item["arguments"]) for item in response["output"][1:]] == calls
    assert [(block["name"], json.dumps(block["input"])) for block in message["content"][1:]] == calls
    assert response["output"][0]["content"][0]["text"] == message["content"][0]["text"] == "Well.\n"
    assert message["stop_reason"] == "tool_use"


async def test_ids_are_as_long_as_a_mistral_template_demands() -> None:
    engine = FakeEngine()
    call = {"id": "call_00112233445566", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "b-1"}]},
        {"role": "tool", "tool_call_id": "call_00112233445566", "content": "2"},
        {"role": "tool", "tool_call_id": "b-1", "content": "3"},
    ]
    await whole(engine, messages=messages, template=MISTRAL_TEMPLATE)
    prompt = byte_tokenizer().decode(engine.submitted[0].prompt_token_ids)
    assert '[TOOL_CALLS]add[CALL_ID]233445566[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]0000000b1' in prompt
    assert prompt.endswith("[233445566]2[0000000b1]3")


async def test_calls_in_what_a_model_thinks_are_not_made() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    begun = TOOL_TEMPLATE + "<think>"
    for template, text in ((TOOL_TEMPLATE, f"<think>{call}</think>"), (begun, f"{call}</think>")):
        (answer,) = await whole(FakeEngine(script=says(text + call)), template=template)
        assert answer.message.content == text and len(answer.message.tool_calls or ()) == 1
        assert await streamed(FakeEngine(script=says(text)), template=template) == (text, [], "stop")


async def test_json_that_response_format_asks_for_is_no_call_and_is_not_held_back() -> None:
    pytest.importorskip("llguidance")
    written, form = '{"name": "add", "arguments": {"a": 1}}', {"type": "json_object"}
    (answer,) = await whole(FakeEngine(script=says(written)), response_format=form)
    assert (answer.message.content, answer.message.tool_calls) == (written, None)
    stream = await post(FakeEngine(script=says(written)), stream=True, response_format=form)
    assert stream.text.count('"delta":{"content":') > 10


async def test_without_calls_the_answer_is_as_ever() -> None:
    (answer,) = await whole(FakeEngine())
    assert (answer.message.content, answer.finish_reason) == ("Hello, world.", "stop")
    assert answer.message.tool_calls is None
    assert await streamed(FakeEngine(), logprobs=True) == ("Hello, world.", [], "stop")
    (answer,) = await whole(FakeEngine(script=says(WRITTEN)), tool_choice="none")
    assert answer.message.content == WRITTEN and answer.finish_reason == "stop"


async def test_the_prompt_of_a_template_with_tools_is_the_templates() -> None:
    engine = FakeEngine()
    await whole(engine)
    prompt = byte_tokenizer().decode(engine.submitted[0].prompt_token_ids)
    assert prompt.startswith("weather add ") and "expert" not in prompt


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, CHAT_TEMPLATE])
async def test_tokenize_counts_tools(template: str) -> None:
    engine = FakeEngine()
    await whole(engine, template=template)
    async with client_of(app_for(engine, info=planned(max_model_len=4096), template=template)) as client:
        answer = (await client.post("/tokenize", json={"messages": [USER], "tools": TOOLS})).json()
    assert answer["tokens"] == engine.submitted[0].prompt_token_ids


async def test_a_template_without_tools_gets_our_prompt_with_calls_and_results() -> None:
    engine = FakeEngine()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    await whole(engine, messages=messages, template=CHAT_TEMPLATE)
    prompt = byte_tokenizer().decode(engine.submitted[0].prompt_token_ids)
    assert "Be kind.\n\nYou are an expert in composing functions" in prompt and '"name": "weather"' in prompt
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>' in prompt
    assert "<tool_response>\n2\n</tool_response>" in prompt
    await whole(engine, tool_choice="none", template=CHAT_TEMPLATE)
    assert "weather" not in byte_tokenizer().decode(engine.submitted[1].prompt_token_ids)


HALF = r'{"arguments": {"a": "\ud83d"}, "name": "add"}'


async def test_an_answer_with_half_a_surrogate_pair_is_an_answer() -> None:
    (answer,) = await whole(FakeEngine(script=says(HALF)))
    assert [call.function.arguments for call in answer.message.tool_calls] == [r'{"a": "\ud83d"}']
    assert await streamed(FakeEngine(script=says(HALF))) == ("", [("add", r'{"a": "\ud83d"}')], "tool_calls")


@pytest.mark.parametrize("template", [MISTRAL_TEMPLATE, CHAT_TEMPLATE], ids=("with tools", "without tools"))
@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"\\udc00": 1}', '{"a": 1e999}', '{"a": '])
async def test_arguments_that_are_no_valid_json_reach_the_prompt_as_text(arguments: str, template: str) -> None:
    engine = FakeEngine()
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    await whole(engine, messages=messages, template=template)
    assert json.dumps(arguments) in byte_tokenizer().decode(engine.submitted[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two functions with the name 'weather'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "known"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice", 'is "auto" without tools; send tools'),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice", 'is "auto" without tools; send tools'),
        ({"tool_choice": "always"}, "tool_choice", "should be 'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "is of the type 'custom'; supported: none, auto"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is missing"),
        ({"tool_choice": allowed("none")}, "tool_choice.allowed_tools.mode", "should be 'auto' or 'required'"),
        ({"tool_choice": allowed("required", "sub")}, "tool_choice", '"required" needs tools'),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "may be missing beside tool_calls"),
        (
            {"tool_choice": "required", "structured_outputs": {"json_object": True}},
            "tool_choice",
            "leave one out",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters.type",
            "arguments are an object",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
            "Unimplemented keys",
        ),
        (
            {
                "tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": allowed("required", "f"),
            },
            "tools[2].function.parameters",
            "Unimplemented keys",
        ),
        (
            {
                "tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}],
                "tool_choice": allowed("auto", "f"),
            },
            "tools[2].function.parameters.type",
            "arguments are an object",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": {"a": -(2**63)}}}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools[0].function.parameters",
            "it has the number -9223372036854775808",
        ),
    ],
    ids=str,
)
async def test_what_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    response = await post(FakeEngine(), **fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param, error
    assert message in error["message"] or message == "known" and "not among the tools: weather, add" in error["message"]
