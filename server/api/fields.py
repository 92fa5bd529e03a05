"""The base of every object in a request, and how a check refuses a value."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator, GetCoreSchemaHandler
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

MAX_NESTING = 256  # of a request's JSON. Python's own limits depend on the place in the program, so some steps would fail above it.


def is_nested_deeply(value: Any) -> bool:
    """True if lists and objects are nested deeper than ``MAX_NESTING``."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        parents = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        if not parents:
            return False
        level = [part for parent in parents for part in parent]
    return True


def refusal(why: str) -> PydanticCustomError:
    """The error that a field's check raises; the answer says ``{path} {why}``."""
    return PydanticCustomError("refused", "{why}", {"why": why})


def told_apart(kind_of: Callable[[dict[str, Any]], Any], supported: str) -> Discriminator:
    """Tells the members of a union of ``Fields`` apart; each has the ``Tag`` ~ and its kind, a text ~. ``supported``: for the error."""

    def tag(value: Any) -> str | None:
        if isinstance(value, str):
            return "~"
        return f"~{kind_of(value)}" if isinstance(value, dict) and isinstance(value.get("type"), str | None) else None

    return Discriminator(tag, custom_error_type="kind", custom_error_message=supported)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _adapted(schema: Any) -> Any:
    """A copy of the schema, or of a part of it. A list ends at its first invalid item; 4.0 is an integer, as in JSON."""
    if isinstance(schema, dict):
        ends = {"fail_fast": True} if schema.get("type") == "list" else {}
        copy: Any = {name: _adapted(part) for name, part in schema.items()} | ends
        return no_info_before_validator_function(_whole, copy) if schema.get("type") == "int" else copy
    return [_adapted(part) for part in schema] if isinstance(schema, list) else schema


class Fields(BaseModel):
    """Base of every object in a request. Unknown fields are in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return _adapted(handler(source))  # to collect the errors of a million items takes seconds
