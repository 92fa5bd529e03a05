"""Random schemas, patterns and tools: the answer is 200, or a 400 that names the field, never an error of the server."""

import copy
import random
from typing import Any

import httpx
import pytest
from helpers.server.made_up_schemas import make_schemas

pytest.importorskip("llguidance")

VALUES: list[Any] = [
    None,
    True,
    -1,
    1e300,
    "",
    "string",
    "[a-z]+",
    "a(",
    "#/$defs/leaf",
    "#/nowhere",
    [],
    {},
    [{}],
    ["a", 1],
]
KEYWORDS = [
    *("type", "$ref", "enum", "const", "pattern", "format", "minimum", "maxLength", "minItems", "items", "prefixItems"),
    *(
        "properties",
        "required",
        "additionalProperties",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "$defs",
        "unknown",
        "multipleOf",
    ),
]
PATTERNS = [
    "a{9999}",
    "(?=a)b",
    "[",
    "(a|b)*c",
    "\\",
    "(?i:x)",
    "\\p{L}{3}",
    "a{2,1}",
    "^$",
    "(((((a)))))",
    "[^\\x00-\\xff]",
    "é+",
]


def places(value: Any) -> list[Any]:
    """Every object and list inside a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, (dict, list)) else []
    return own + [place for each in inner for place in places(each)]


def mutate(rng: random.Random, schema: dict[str, Any]) -> dict[str, Any]:
    schema = copy.deepcopy(schema)
    for _ in range(rng.randrange(1, 4)):
        place, value = rng.choice(places(schema)), copy.deepcopy(rng.choice([*VALUES, schema]))
        if isinstance(place, dict):
            place[rng.choice([*KEYWORDS, *place])] = value
        elif place:
            place[rng.randrange(len(place))] = value
    return schema


async def test_random_schemas_patterns_and_tools(client: httpx.AsyncClient) -> None:
    rng, statuses = random.Random(4), set()
    schemas = make_schemas(150, seed=4)
    for index, schema in enumerate(schemas):
        broken = mutate(rng, schema)
        function = {"name": rng.choice(["f", "g-1", "a b", ""]), "parameters": broken}
        tools = {"tools": [{"type": rng.choice(["function", "function", "custom"]), "function": function}]}
        fields = [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": broken}}},
            {
                "structured_outputs": {
                    rng.choice(["json", "choice", "regex", "grammar"]): rng.choice([broken, *PATTERNS])
                }
            },
            {
                **tools,
                "tool_choice": rng.choice(
                    ["none", "auto", "required", {"type": "function", "function": {"name": "f"}}]
                ),
            },
        ][index % 3]
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, **fields}
        response = await client.post("/v1/chat/completions", json=body)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400), (body, response.text)
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["param"] and error["message"], body
    assert statuses == {200, 400}
