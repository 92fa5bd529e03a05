"""Lists every configuration key with its default and description, as text."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from tightwire.training.config.read import models_in
from tightwire.training.config.tree import TrainConfig


def describe_config() -> str:
    return "".join(f"{line}\n" for line in _lines(TrainConfig, ""))


def _lines(section: type[BaseModel], under: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = list(models_in(field.annotation))
        if not inner:
            default = "required" if field.is_required() else _words(field.get_default(call_default_factory=True))
            yield f"{under}{name} ({default}){': ' + field.description if field.description else ''}"
        for model in inner:
            yield ""
            yield f"{under}{name}: {' '.join((model.__doc__ or '').split())}"
            yield from _lines(model, f"{under}{name}.")


def _words(default: Any) -> str:
    return "null" if default is None else repr(default) if isinstance(default, str) else str(default)
