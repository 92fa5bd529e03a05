"""The base of the sections of a configuration, and types of numbers that several have."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tightwire.comm.codec.codec_names import parse_format
from tightwire.comm.link.link import parse_link


def checks(parse: Callable[[str], object]) -> AfterValidator:
    """Refuses what ``parse`` refuses, and keeps the text; an empty one is not given."""

    def check(text: str) -> str:
        if text:
            parse(text)
        return text

    return AfterValidator(check)


Codec = Annotated[str, checks(parse_format)]
Link = Annotated[str, checks(parse_link)]
Share = Annotated[float, Field(ge=0, lt=1)]
ShareOrAll = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """One level of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _no_flags_as_numbers(cls, values: Any) -> Any:
        """Refuse true and false where a number belongs; pydantic takes them as 1 and 0."""
        for name, value in values.items() if isinstance(values, dict) else ():
            is_flag = any(type(each) is bool for each in (value if isinstance(value, list) else [value]))
            if is_flag and name in cls.model_fields and cls.model_fields[name].annotation is not bool:
                raise ValueError(f"{name} must not be true or false, got {value}")
        return values
