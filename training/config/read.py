"""Reads a ``TrainConfig`` from a YAML file and ``key=value`` overrides, and lists all keys.

One error names all invalid values.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from tightwire.comm.errors import suggest
from tightwire.training.config.tree import TrainConfig

EXAMPLES = Path(__file__).parent / "examples"


class ConfigError(ValueError):
    """The file, an override or a value is invalid; the message says what to change."""


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read ``path`` (or the example of that name) and apply overrides ``a.b=value``. Values are YAML: ``[1, 2]``, ``null``.

    Raises:
        ConfigError: with one line for each invalid key or value.
    """
    values = _read_yaml(_find(path))
    for override in overrides:
        _apply(values, override)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error))) from None


def to_values(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain values, with defaults."""
    return config.model_dump(mode="json")


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    named = {example.stem: example for example in sorted(EXAMPLES.glob("*.yaml"))}
    if str(path) in named:
        return named[str(path)]
    raise ConfigError(f"{path}: there is no such file or example; examples: {', '.join(named)}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, _Loader)
        _check_ends(root, ())
        values = yaml.load(text, _Loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must contain `key: value` lines, not {type(values).__name__}")
    if doubled := next(_doubled(root), ""):
        raise ConfigError(f"{path}: {doubled} appears twice")
    return values


class _Loader(yaml.SafeLoader):
    """Reads 1e-8 as a number, as YAML 1.2 does. YAML 1.1 reads it as text, because it has no decimal point."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _check_ends(node: Any, above: tuple[Any, ...]) -> None:
    """
    Raises:
        yaml.YAMLError: an alias names a node that contains it, which makes the tree infinite.
    """
    if node in above:
        raise yaml.YAMLError(f"an alias refers to a node that contains it{node.start_mark}")
    for value in getattr(node, "value", ()):
        for inner in value if isinstance(value, tuple) else [value]:
            if isinstance(inner, yaml.Node):
                _check_ends(inner, (*above, node))


def _doubled(node: yaml.Node | None, under: str = "") -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        names = [under + str(key.value) for key, _ in node.value]
        yield from (name for name in names if names.count(name) > 1)
        for name, (_, value) in zip(names, node.value, strict=True):
            yield from _doubled(value, f"{name}.")


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not an override; write key=value, such as schedule.steps=100")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
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
    """Drop the union member that pydantic adds after ``between``, the only union of sections; the file has no such key."""
    return (str(part) for before, part in zip(["", *loc], loc, strict=False) if before != "between")


def _nearest(name: str) -> str:
    known = list(_keys(TrainConfig))
    in_another_section = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    return suggest(name, known, f"; did you mean {in_another_section[0]!r}?" if in_another_section else "")


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
