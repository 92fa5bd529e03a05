"""Structured output: the fields that ask for a form of the answer, and the grammar that they mean."""

import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from tightwire.model.sampling.grammar import grammar_error, make_grammar
from tightwire.server.api.errors import ApiError, invalid
from tightwire.server.api.fields import Fields

Schema = dict[str, Any]
_Text = Annotated[str, Field(min_length=1)]

# Keywords of JSON Schema whose value is a schema, a list of schemas, or an object of named schemas.
_SUBSCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_NAMED = ("$defs", "definitions", "properties", "patternProperties")
# llguidance compiles an optional item by item, and a multiple as one state for each remainder: larger ones take seconds and
# gigabytes.
_MAX_ITEMS = 10_000
_MAX_DIVISOR = 20_000
# Keywords that llguidance does not know, with values that allow everything. zod writes the first for each record.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"propertyNames": (True, {}, {"type": "string"}), "uniqueItems": (False,)}
_SEARCH_S = 0.5  # of CPU, for the innermost schema that is refused
_NOT_INSTALLED = "needs the package llguidance, which is not installed on this server: `pip install llguidance`"


class JsonSchemaFormat(Fields):
    name: str | None = Field(None, max_length=64, description="Accepted and ignored: a label.")
    description: str | None = Field(None, description="Accepted and ignored.")
    schema_: Schema = Field(alias="schema", description="The JSON schema that the answer follows.")
    strict: bool | None = Field(None, description="Accepted and ignored: the answer follows the schema anyway.")


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With the type json_schema.")
    schema_: Schema | None = Field(None, alias="schema", description="Extension: that of the type json_object.")


class StructuredOutputs(Fields):
    """One of these fields."""

    json_: Schema | str | None = Field(None, alias="json", description="A JSON schema, as an object or as a text.")
    json_object: bool | None = Field(None, description="True: any JSON object.")
    regex: _Text | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: list[_Text] | None = Field(None, min_length=1, description="The answer is one of these texts.")
    grammar: _Text | None = Field(None, description="A grammar in Lark's or GBNF's notation.")


def structured_grammar(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> str:
    """The grammar that these fields ask for; empty: none. ApiError 400 with the path of what is not supported."""
    asked = [*_of_format(response_format), *_of_outputs(outputs)]
    if len(asked) > 1:
        raise invalid(f"{asked[0][0]} and {asked[1][0]} both set the form of the answer; give one of them", asked[1][0])
    return checked_grammar(*asked[0]) if asked else ""


def _of_format(given: ResponseFormat | None) -> Iterator[tuple[str, Any, Any]]:
    if given is not None and (given.type == "json_schema") != (given.json_schema is not None):
        path = "response_format.json_schema"
        raise invalid(f"{path} belongs to the type json_schema, and that type needs it", path)
    if given is not None and given.schema_ is not None and given.type != "json_object":
        raise invalid("response_format.schema belongs to the type json_object", "response_format.schema")
    if given is not None and given.json_schema is not None:
        yield "response_format.json_schema.schema", "json", given.json_schema.schema_
    elif given is not None and given.type == "json_object":
        yield f"response_format{'.schema' if given.schema_ else ''}", "json", given.schema_ or {"type": "object"}


def _of_outputs(given: StructuredOutputs | None) -> Iterator[tuple[str, Any, Any]]:
    if given is None:
        return
    kinds = ("json_", "json_object", "regex", "choice", "grammar")
    if all(getattr(given, kind) is None for kind in kinds):
        message = "structured_outputs is empty; give json, json_object, regex, choice or grammar"
        raise invalid(message, "structured_outputs")
    if given.json_ is not None:
        yield "structured_outputs.json", "json", given.json_
    if given.json_object:
        yield "structured_outputs.json_object", "json", {"type": "object"}
    for kind in ("regex", "choice", "grammar"):
        if (source := getattr(given, kind)) is not None:
            yield f"structured_outputs.{kind}", kind, source


def checked_grammar(path: str, kind: Any, source: Any) -> str:
    """The grammar of ``source`` (see ``make_grammar``). ApiError 400: it is invalid, or llguidance is not installed."""
    try:
        if kind == "json" and isinstance(source, str):
            source = _parsed(path, source)
        if kind == "json":
            _drop_and_limit(path, source)
        if kind == "regex" and (len(source) - len(source.rstrip("\\"))) % 2:
            raise invalid(f"{path} ends with a \\ that escapes nothing", path)
        grammar = make_grammar(kind, source)
        problem = grammar_error(grammar)
        if problem is not None and kind == "json":
            path, problem = _innermost(source, path, source, problem, time.process_time() + _SEARCH_S)
    except ImportError:
        raise ApiError(400, f"{path} {_NOT_INSTALLED}", param=path, code="unsupported_parameter") from None
    except (ValueError, RecursionError) as error:
        problem, grammar = str(error), ""
    if problem is not None:
        raise invalid(f"{path} is not supported: {' '.join(problem.split())[:500]}", path, code="unsupported_grammar")
    return grammar


def _parsed(path: str, text: str) -> Schema:
    try:
        return msgspec.json.decode(text, type=Schema)
    except msgspec.DecodeError as error:
        raise invalid(f"{path} is a text that is not valid JSON, or not an object: {error}", path) from None


def _drop_and_limit(path: str, schema: Schema) -> None:
    """Drop what allows everything. ApiError 400: a bound in this schema or in one inside it makes the grammar too large."""
    for key, all_values in _WITHOUT_EFFECT.items():
        if schema.get(key, ...) in all_values:
            del schema[key]
    for key in ("minItems", "maxItems"):
        if isinstance(bound := schema.get(key), int | float) and bound > _MAX_ITEMS:
            raise invalid(f"{path}.{key} is {bound}; at most {_MAX_ITEMS} is possible", f"{path}.{key}")
    if isinstance(divisor := schema.get("multipleOf"), int | float) and not isinstance(divisor, bool):
        digits = Decimal(repr(divisor)).normalize().as_tuple().digits
        if int("".join(map(str, digits))) > _MAX_DIVISOR:
            message = f"{path}.multipleOf is {divisor}; at most {_MAX_DIVISOR} is possible, times a power of ten"
            raise invalid(message, f"{path}.multipleOf")
    for name, part in _subschemas(schema):
        _drop_and_limit(f"{path}.{name}", part)


def _innermost(root: Schema, path: str, schema: Schema, problem: str, deadline_s: float) -> tuple[str, str]:
    """The path of the innermost subschema that is refused even alone, as far as it is found in time, and its problem."""
    for name, part in _subschemas(schema):
        if time.process_time() > deadline_s:
            break
        # References point into the whole schema, so its definitions stay.
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        alone = {**shared, **part} if not name.startswith(("$defs", "definitions")) else part
        inner = grammar_error(make_grammar("json", alone))
        if inner is not None and "does not exist" not in inner:
            return _innermost(root, f"{path}.{name}", part, inner, deadline_s)
    return path, problem


def _subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for key in _NAMED:
        if isinstance(parts := schema.get(key), dict):
            yield from ((f"{key}.{name}", part) for name, part in parts.items() if isinstance(part, dict))
    for key in _SUBSCHEMAS:
        if isinstance(part := schema.get(key), dict):
            yield key, part
    for key in _LISTS:
        if isinstance(parts := schema.get(key), list):
            yield from ((f"{key}[{index}]", part) for index, part in enumerate(parts) if isinstance(part, dict))
