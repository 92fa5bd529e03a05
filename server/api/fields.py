"""The base of every object in a request, and how a check refuses a value."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


def refusal(why: str) -> PydanticCustomError:
    """The error that a field's check raises; the answer says ``{path} {why}``."""
    return PydanticCustomError("refused", "{why}", {"why": why})


class Fields(BaseModel):
    """Base of every object in a request. Unknown fields are in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def extra_fields(fields: Fields, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of each unknown field, at any depth; ``null`` counts as not given."""
    for name, value in (fields.model_extra or {}).items():
        if value is not None:
            yield f"{path}{name}", name, value
    for name in sorted(fields.model_fields_set & type(fields).model_fields.keys()):
        value = getattr(fields, name)
        if isinstance(value, Fields):
            yield from extra_fields(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Fields):
            for index, item in enumerate(value):
                yield from extra_fields(item, f"{path}{name}[{index}].")
