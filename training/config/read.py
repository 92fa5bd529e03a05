"""Reads a ``TrainConfig`` from a YAML file and ``key=value`` overrides, and lists all keys."""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tightwire.option import suggest
from tightwire.training.config.tree import TrainConfig

EXAMPLES = Path(__file__).parent / "examples"


class ConfigError(ValueError):
    """The file, an override or a value is invalid; the message says what to change."""


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read ``path`` (or the example of that name) and apply overrides ``a.b=value``. Values are YAML: ``[1, 2]``, ``null``.

    Raises ConfigError with one line for each invalid key or value.
    """
    values = _read_yaml(_find(Path(path)))
    for override in overrides:
        _apply(values, override)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error))) from None


def _find(path: Path) -> Path:
    named = {example.stem: example for example in sorted(EXAMPLES.glob("*.yaml"))}
    if path.is_file() or str(path) in named:
        return path if path.is_file() else named[str(path)]
    raise ConfigError(f"{path}: there is no such file or example{suggest(str(path), named)}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, _Loader)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: also of an impossible date
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must contain `key: value` lines, not {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """Reads 1e-8 as a number, unlike YAML 1.1; refuses a repeated key and an alias inside its own value."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.deep_construct = True

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"{doubled} appears twice{node.start_mark}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+\Z"), "-+0123456789")


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not an override; write key=value, such as schedule.steps=100")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{override!r}: the value is not YAML: {error}") from None
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        values[section] = inner = dict(inner) if isinstance(inner, dict) else {}
        values = inner
    values[last] = value


def _lines(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        name = ".".join(_place(problem["loc"]))
        kind, message = problem["type"], problem["msg"].removeprefix("Value error, ")
        if kind == "extra_forbidden":
            yield f"unknown key {name}{_nearest(name)}"
        elif kind == "missing":
            yield f"{name} is missing"
        elif kind == "union_tag_not_found":
            yield f"{name}.kind is missing"
        elif kind == "value_error":
            yield f"{name}: {message}" if name else message
        else:
            yield f"{name}: {message} (got {problem['input']!r})"


def _place(loc: Sequence[int | str]) -> Iterator[str]:
    """Drop the member that pydantic adds after the name of a union; the file has no such key."""
    return (str(part) for i, part in enumerate(loc) if not i or loc[i - 1] not in ("between", "checkpoint_blocks"))


def _nearest(name: str) -> str:
    """The key whose last part is the most similar, in the same section if it has one; else the keys of that section."""
    section, _, leaf = name.rpartition(".")
    places: dict[str, list[str]] = {}
    for key in _keys(TrainConfig):
        under, _, own = key.rpartition(".")
        places.setdefault(own, []).append(under)
    known = [own for own, under in places.items() if section in under]
    alike = difflib.get_close_matches(leaf, places, n=1, cutoff=0.75)
    if alike and (section in ("", *places[alike[0]]) or not known):
        under = min(places[alike[0]], key=lambda place: place != section)
        return f"; did you mean {f'{under}.{alike[0]}'.removeprefix('.')!r}?"
    return f"; {section or 'a configuration'} has {', '.join(known)}" if known else ""


def _keys(section: type[BaseModel], under: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield under + name
        for inner in models_in(field.annotation):
            yield from _keys(inner, f"{under}{name}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from models_in(argument)


def describe_config() -> str:
    return "".join(f"{line}\n" for line in _key_lines(TrainConfig, ""))


def _key_lines(section: type[BaseModel], under: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = list(models_in(field.annotation))
        if not inner:
            default = "required" if field.is_required() else _words(field.get_default(call_default_factory=True))
            yield f"{under}{name} ({default}){': ' + field.description if field.description else ''}"
        for model in inner:
            yield ""
            yield f"{under}{name}: {' '.join((model.__doc__ or '').split())}"
            yield from _key_lines(model, f"{under}{name}.")


def _words(default: Any) -> str:
    return "null" if default is None else repr(default) if isinstance(default, str) else str(default)
