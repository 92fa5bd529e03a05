"""JSON schemas of varied features, made from a seed; the first 200 of seed 25 are those of ``bench lab structured``.

Strings, numbers and arrays are bounded, so that an answer at temperature 1 ends.
"""

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = [
    "name",
    "age",
    "city",
    "tags",
    "price",
    "unit price",
    "état",
    "is_open",
    "id",
    "x-y",
    "a.b",
    "größe",
    "status",
]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname"]
_PATTERNS = [
    "^[A-Z]{2}-[0-9]{3,5}$",
    "^(red|green|blue)$",
    r"^\d{4}-\d{2}$",
    "^[a-z]+(_[a-z]+){0,2}$",
    "^#[0-9a-f]{6}$",
]


def _string(rng: random.Random) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 24)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 30}
    if kind == 2:
        return {"type": "string", "format": rng.choice(_FORMATS), "maxLength": 40}
    return {
        "type": "string",
        "enum": rng.sample(["small", "medium", "large", 'a "quoted" one', "käse", "日本", "\\"], 3),
    }


def _number(rng: random.Random) -> Schema:
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 1000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 10},
            {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
            {"type": "number", "exclusiveMinimum": abs(low), "maximum": abs(low) + 3.5, "multipleOf": 0.25},
            {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
        ]
    )


def _leaf(rng: random.Random) -> Schema:
    fixed = [
        {"type": "boolean"},
        {"type": "null"},
        {"const": rng.choice([7, "fixed", None, True, [1, "two"], {"a": 1}])},
        {"enum": [1, "two", None, 3.5, False]},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    ]
    return rng.choice([_string(rng), _string(rng), _number(rng), rng.choice(fixed)])


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    bounds = {"minItems": least, "maxItems": least + rng.randrange(1, 4)}
    if rng.random() < 0.25:
        return {"type": "array", "prefixItems": [_leaf(rng), _number(rng)], "items": False, "minItems": 2}
    return {"type": "array", "items": _schema(rng, depth - 1), **bounds}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(1, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema |= {"patternProperties": {"^[0-9]{1,6}$": {"type": "boolean"}}, "maxProperties": len(names) + 1}
        schema["required"] = names
    if rng.random() < 0.3:
        schema |= {"title": "Made up", "description": "An object.", "$comment": "no effect", "examples": [{}]}
    return schema


def _map(rng: random.Random) -> Schema:
    properties = {"patternProperties": {"^[a-z]{1,5}$": _leaf(rng)}, "additionalProperties": False}
    return {"type": "object", **properties, "maxProperties": 3}


def _union(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(3)
    if kind == 0:
        return {"anyOf": [_leaf(rng), _schema(rng, depth - 1)]}
    if kind == 1:
        return {"oneOf": [{"type": "boolean"}, {"type": "null"}, _number(rng)]}
    sides = [({"a": {"type": "boolean"}}, "a"), ({"b": _number(rng)}, "b")]
    return {"allOf": [{"type": "object", "properties": each, "required": [name]} for each, name in sides]} | {
        "unused": 1,
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    }


def _schema(rng: random.Random, depth: int) -> Schema:
    if depth <= 0:
        return _leaf(rng)
    return rng.choice(
        [_leaf, lambda r: _object(r, depth), lambda r: _array(r, depth), lambda r: _union(r, depth), _map]
    )(rng)


def _with_references(rng: random.Random) -> Schema:
    where = rng.choice(["$defs", "definitions"])
    tree = {
        "type": "object",
        "properties": {"value": _leaf(rng), "child": {"anyOf": [{"type": "null"}, {"$ref": f"#/{where}/leaf"}]}},
        "required": ["value", "child"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "one": {"$ref": f"#/{where}/tree"},
            "many": {"type": "array", "items": {"$ref": f"#/{where}/leaf"}, "maxItems": 3},
        },
        "required": ["one", "many"],
        "additionalProperties": False,
        where: {"tree": tree, "leaf": _object(rng, 1)},
    }


def make_schemas(count: int = 200, seed: int = 25) -> list[Schema]:
    rng = random.Random(seed)
    kinds = [
        lambda: _object(rng, 3),
        lambda: _array(rng, 3),
        lambda: _with_references(rng),
        lambda: _union(rng, 2),
        lambda: _map(rng),
    ]
    return [kinds[0 if index % 2 else index // 2 % 5]() for index in range(count)]
