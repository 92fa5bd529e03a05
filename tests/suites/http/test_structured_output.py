"""Structured output through HTTP, with the real engine and sampler: every form, with n, seeds, streams, drafts and logprobs."""

import json
import re
import sys
from typing import Any

import httpx
import pytest
from helpers.server.fake_engine import FakeEngine, app_for, client_of
from helpers.server.sampling_engine import SamplingEngine
from jsonschema_rs import validator_for

from tightwire.model.sampling.grammar import GrammarMasks

pytest.importorskip("llguidance")

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200}
ADDRESS = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["zip"]}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dog", None]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "home": {"$ref": "#/$defs/address"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "legs", "home", "tags"],
    "additionalProperties": False,
    "$defs": {"address": {**ADDRESS, "additionalProperties": False}},
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}


def open_client(engine: FakeEngine) -> httpx.AsyncClient:
    return client_of(app_for(engine))


async def chat(engine: FakeEngine, **fields: Any) -> list[dict[str, Any]]:
    """The choices; of a stream, with all pieces joined."""
    async with open_client(engine) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return [choice | {"content": choice["message"]["content"]} for choice in response.json()["choices"]]
    choices: dict[int, dict[str, Any]] = {}
    for line in response.text.splitlines():
        for piece in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
            choice = choices.setdefault(piece["index"], {"content": ""})
            choice["content"] += piece["delta"].get("content") or ""
            choice["finish_reason"] = piece["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def texts(choices: list[dict[str, Any]]) -> list[str]:
    return [choice["content"] for choice in choices]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_p": 0.9}, {"top_k": 3}], ids=str)
async def test_a_schema_with_n_seeds_streams_drafts_and_logprobs(sampling: dict[str, Any]) -> None:
    fields = {"response_format": AS_SCHEMA, "n": 2, "seed": 3, **sampling}
    plain = await chat(SamplingEngine(), **fields)
    for choice in plain:
        assert choice["finish_reason"] == "stop"
        validator_for(SCHEMA).validate(json.loads(choice["content"]))
    for engine in (
        SamplingEngine(speculation="ngram"),
        SamplingEngine(speculation="draft"),
        SamplingEngine(plan_ahead=True),
    ):
        assert texts(await chat(engine, **fields)) == texts(plain)
    assert texts(await chat(SamplingEngine(), **fields, stream=True)) == texts(plain)
    # With logprobs each token is sampled, so no token is appended without a forward pass.
    assert texts(await chat(SamplingEngine(), **fields, logprobs=True)) == texts(plain)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"json": {"const": [1, "a"]}}, r'\[1, "a"\]'),
        ({"json": '{"type": "boolean"}'}, "true|false"),
        ({"json": {"type": "integer", "const": -1e18}}, "-1000000000000000000"),
        ({"json": {"const": '-9223372036854775808 "-1e300'}}, r'"-9223372036854775808 \\"-1e300"'),
        ({"grammar": 'start: "-1e300 x" | "y"'}, "-1e300 x|y"),
        ({"regex": "[ab]{3}-[0-9]+x"}, "[ab]{3}-[0-9]+x"),
        ({"choice": ["yes", 'no "never"', "perhaps / not"]}, 'yes|no "never"|perhaps / not'),
        ({"grammar": 'start: greeting " " NAME\ngreeting: "hi" | "bye"\nNAME: /[A-C]{2}/'}, "(hi|bye) [A-C]{2}"),
        ({"grammar": '?start: sum\n?sum: DIGIT | DIGIT "+" DIGIT\nDIGIT: /[0-9]/'}, r"\d(\+\d)?"),
        ({"grammar": 'root ::= "a" item+\nitem ::= [xy] "."'}, r"a([xy]\.)+"),
    ],
    ids=str,
)
async def test_other_forms(form: dict[str, Any], pattern: str) -> None:
    for choice in await chat(SamplingEngine(), structured_outputs=form, n=3, seed=1):
        assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["content"])


async def test_any_json_object() -> None:
    form = {"type": "json_object"}
    content = texts(await chat(SamplingEngine(), response_format=form, max_tokens=30, temperature=0))[0]
    assert content.startswith("{")
    assert texts(await chat(SamplingEngine(), response_format={"type": "text"}, seed=1)) == texts(
        await chat(SamplingEngine(), seed=1)
    )


async def test_a_schema_beside_the_type_json_object() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    (content,) = texts(await chat(SamplingEngine(), response_format={"type": "json_object", "schema": schema}, seed=1))
    assert json.loads(content) == {"a": 7}


async def test_keywords_that_allow_everything() -> None:
    """As zod writes a record, and C# an array."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
    flags = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": False}
    properties = {"r": record, "a": flags}
    schema = {"type": "object", "properties": properties, "required": ["r"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    (text,) = texts(await chat(SamplingEngine(), response_format=form, max_tokens=20))
    assert text.startswith('{"r": {')


async def test_a_completion_and_stop_strings() -> None:
    body = {"prompt": "Hi", "structured_outputs": {"regex": "[ab]{9}[.]end"}, "stop": "."}
    async with open_client(SamplingEngine()) as client:
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert re.fullmatch("[ab]{9}", choice["text"]) and choice["finish_reason"] == "stop"


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


IN_SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (_schema({"not": {}}), IN_SCHEMA, 'Unimplemented keys: ["not"]'),
        (
            _schema({"properties": {"a": {"type": "array", "items": {"uniqueItems": True}}}}),
            f"{IN_SCHEMA}.properties.a.items",
            "uniqueItems",
        ),
        (
            _schema({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"type": "null"}, {"format": "zip"}]}}}),
            f"{IN_SCHEMA}.$defs.x.anyOf[1]",
            "Unknown format: zip",
        ),
        (_schema({"$ref": "#/$defs/y"}), IN_SCHEMA, "does not exist"),
        (_schema({"oneOf": [{"const": 1}, {"const": 2}]}), IN_SCHEMA, "oneOf constraints are not supported. Use anyOf"),
        (_schema({"properties": {"a": {"pattern": "(?=a)"}}}), f"{IN_SCHEMA}.properties.a", "look-around"),
        (_schema({"type": "integer", "minimum": 5, "maximum": 2}), IN_SCHEMA, "greater than maximum"),
        (_schema([]), f"{IN_SCHEMA}", "dictionary"),
        (_schema({"properties": {"a": {"multipleOf": 999_983}}}), f"{IN_SCHEMA}.properties.a.multipleOf", "20000"),
        (_schema({"properties": {"a": {"multipleOf": True}}}), f"{IN_SCHEMA}.properties.a", "not supported"),
        (_schema({"type": "array", "maxItems": 10**6}), f"{IN_SCHEMA}.maxItems", "at most 10000"),
        # llguidance ends the process on numbers near -2^63.
        (
            _schema({"properties": {"a": {"enum": [1, [-(2**63)]]}}}),
            f"{IN_SCHEMA}.properties.a",
            "numbers above -92233720",
        ),
        (_schema({"type": "integer", "const": -1e300}), IN_SCHEMA, "it has the number -1e300, which is too low"),
        (
            {"structured_outputs": {"json": '{"const": {"a": -9223372036854775300}}'}},
            "structured_outputs.json",
            "too low",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "/" %json {"type": "integer", "const": -0.93E+19}'}},
            "structured_outputs.grammar",
            "it has the number -0.93E+19",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs it"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"grammar": 'start: "a" b'}}, "structured_outputs.grammar", 'unknown name: "b"'),
        ({"structured_outputs": {"regex": "a\\"}}, "structured_outputs.regex", "escapes nothing"),
        ({"structured_outputs": {}}, "structured_outputs", "is empty"),
        (
            {"grammar": "root ::= [a-z]+"},
            "grammar",
            "is not supported: use structured_outputs.grammar, which takes GBNF",
        ),
        ({"json_schema": {"type": "object"}}, "json_schema", "is not supported: use response_format"),
        (
            {"response_format": {"type": "text", "schema": {"type": "object"}}},
            "response_format.schema",
            "belongs to the type json_object",
        ),
        ({"use_beam_search": True}, "use_beam_search", "is not supported: use n, logprobs, and pick the best answer"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "is not supported"),
        ({"guided_regex": "a"}, "guided_regex", "use structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", "not supported"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "give one of them"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "leave it out"),
        ({"structured_outputs": {"regex": "ab"}, "bad_words": ["b"]}, None, "the grammar is too complex"),
    ],
    ids=str,
)
async def test_what_is_refused(fields: dict[str, Any], param: str | None, message: str) -> None:
    async with open_client(SamplingEngine()) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    error = response.json()["error"]
    assert response.status_code == 400 and message in error["message"] and error["param"] == param, error


async def test_a_grammar_that_cannot_be_compiled_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    engine = SamplingEngine()
    with monkeypatch.context() as patched:
        patched.setattr(GrammarMasks, "_matcher", fail)
        async with open_client(engine) as client:
            response = await client.post("/v1/chat/completions", json={**CHAT, "structured_outputs": {"regex": "ab"}})
    assert response.status_code == 500 and "can't start new thread" in response.text
    assert texts(await chat(engine, structured_outputs={"regex": "ab"})) == ["ab"]


async def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with open_client(SamplingEngine()) as client:
        refused = await client.post("/v1/chat/completions", json={**CHAT, "response_format": {"type": "json_object"}})
        answered = await client.post("/v1/chat/completions", json=CHAT)
    assert refused.status_code == 400 and "pip install llguidance" in refused.json()["error"]["message"]
    assert answered.status_code == 200
