"""Flags of declared options: adds them to an argparse parser, converts their texts, and makes the options from them."""

import argparse
import contextlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from tightwire.option import REQUIRED, flag_of, limits_missed, options_of, suggest
from tightwire.sizes import format_bytes

Fields = Mapping[str, Field[Any]]
_Options = TypeVar("_Options")


def add_flags(parser: argparse._ActionsContainer, options: Fields) -> None:
    """Add one argument per option. Arguments not given are absent from the result, so that a file can set them."""
    for name, field in options.items():
        flag = field.metadata["flag"] or flag_of(name)
        given: dict[str, Any] = {"help": _help(field), "default": argparse.SUPPRESS}
        if flag.startswith("-"):
            given |= {"dest": name, "required": field.default is REQUIRED and field.default_factory is MISSING}
        if _kind(field)[0] is bool:
            given["action"] = argparse.BooleanOptionalAction
        else:
            given |= {"type": _flag_type(field), "choices": field.metadata["choices"] or None}
            given |= {"metavar": _metavar(field), "nargs": field.metadata["nargs"], "const": field.metadata["const"]}
        if field.metadata["repeated"]:
            given["action"] = _Append
        parser.add_argument(flag, **given)


def make_options(
    cls: type[_Options], parser: argparse.ArgumentParser, args: argparse.Namespace, **others: Any
) -> _Options:
    """The options of ``cls`` in ``args``, and other fields. What it refuses ends the program with exit code 2."""
    given = vars(args)
    try:
        return cls(**{name: given[name] for name in options_of(cls) if name in given}, **others)
    except ValueError as error:
        parser.error(str(error))


class _Append(argparse.Action):
    """Joins the tuples of a flag that is given several times, or that takes several values."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        new = chain.from_iterable(values) if self.nargs else values
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *new))


def convert(field: Field[Any], value: object) -> Any:
    """A flag's text or a YAML value, converted to the field's annotated type; ValueError if that is not possible."""
    (kind, element, optional), metadata = _kind(field), field.metadata
    if value is None and optional:
        return None
    if isinstance(value, bool) and (word := "on" if value else "off") in metadata["choices"]:
        value = word  # YAML reads `on` and `off` without quotes as true and false
    if metadata["choices"] and value not in metadata["choices"]:
        raise ValueError(f"must be one of {', '.join(metadata['choices'])}, got {value!r}")
    if metadata["parse"] is not None and (isinstance(value, str) or kind not in (*_KINDS, tuple)):
        value = metadata["parse"](str(value))
    elif kind is tuple and isinstance(value, str) and not metadata["repeated"]:
        value = [part.strip() for part in value.split(",")]
    if kind is tuple:
        value = _parts(element, value if isinstance(value, (list, tuple)) else [value])
        value = tuple(dict.fromkeys(value)) if metadata["unique"] else value
    elif kind in _KINDS:
        value = _plain(kind, value, _KINDS[kind])
    for number in value if isinstance(value, tuple) else (value,):
        if want := limits_missed(field, number) if isinstance(number, int | float) else "":
            raise _wrong(want, number)
    return value


_KINDS: dict[type, str] = {
    str: "text (in quotes)",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path",
}
_ELEMENTS: dict[type, str] = {str: "names", int: "whole numbers", float: "numbers"}
_METAVARS: dict[type, str] = {str: "NAME", int: "N", float: "X", Path: "PATH"}


def _parts(element: type, values: Sequence[object]) -> tuple[Any, ...]:
    if element not in _ELEMENTS:
        return tuple(values)  # as ``parse`` made them
    want = f"{_ELEMENTS[element]} with commas between"
    if "" in values:
        raise _wrong(want, "")
    return tuple(_plain(element, part, want) for part in values)


def _plain(kind: type, value: object, want: str) -> Any:
    """``value`` as ``kind``. Text is read as a number or path; a bool is no number, and a fraction is no int."""
    if kind in (str, bool):
        if isinstance(value, kind):
            return value
    elif isinstance(value, (str, int, kind)) and not isinstance(value, bool) and (kind, value) != (Path, ""):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            made = kind(value)
            if kind is not int or -(1 << 63) <= made < 1 << 63:
                return made
            want = f"{want} of at most 64 bits"
    raise _wrong(want, value)


def _wrong(want: str, value: object) -> ValueError:
    return ValueError(f"must be {want}, got {value!r}")


def _kind(field: Field[Any]) -> tuple[type, Any, bool]:
    """A field's type (``int`` for ``int | None``), the type of its elements if it is a tuple, and whether None is allowed."""
    assert not isinstance(field.type, str), "modules of options do not postpone annotations"
    members = typing.get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    kind = next(member for member in members if member is not NoneType)
    return typing.get_origin(kind) or kind, next(iter(typing.get_args(kind)), None), NoneType in members


def _metavar(field: Field[Any]) -> str | None:
    """The placeholder in --help; None: argparse shows the choices or the positional argument's name."""
    metadata, (kind, element, _) = field.metadata, _kind(field)
    if metadata["metavar"] or metadata["choices"] or metadata["flag"][:1] not in ("", "-"):
        return metadata["metavar"] or None
    one = _METAVARS.get(element if kind is tuple else kind)
    return f"{one},{one}" if kind is tuple and one else one


def _flag_type(field: Field[Any]) -> typing.Callable[[str], Any]:
    def from_text(text: str) -> Any:
        if text is argparse.SUPPRESS:  # a positional argument is not given; argparse converts its default too
            return text
        try:
            return convert(field, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return from_text


def _help(field: Field[Any]) -> str:
    """The field's help text with its default, unless that is None or empty."""
    text = field.metadata["help"].replace("%", "%%")
    default: Any = field.default
    if default in (None, (), "", MISSING):
        return text
    values = default if isinstance(default, tuple) else (default,)
    return f"{text} (default: {','.join(_show(value, field.metadata['metavar']) for value in values)})"


def _show(value: object, metavar: str) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return format_bytes(value) if isinstance(value, int) and "BYTES" in metavar else str(value)


def read_yaml(path: Path, fields: Fields) -> dict[str, Any]:
    """Options from a flat YAML mapping, by field name. ValueError: names what is wrong with the file."""
    import yaml  # saves `--help` 20 ms

    try:
        text = path.read_text(encoding="utf-8")
        content, doubled = yaml.safe_load(text), doubled_key(text)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or no such date
        raise ValueError(f"--config {path} is not YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"--config {path}: must be `name: value` lines, got {content!r}")
    if doubled is not None:
        raise ValueError(f"--config {path}: {doubled!r} is given twice")
    values: dict[str, Any] = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise ValueError(f"--config {path}: unknown option {key!r}{suggest(name, fields)}")
        if name in values:
            raise ValueError(f"--config {path}: {name!r} is given twice, with dashes and with underscores")
        try:
            values[name] = convert(fields[name], value)
        except ValueError as error:
            raise ValueError(f"--config {path}: {key}: {error}") from error
    return values


def doubled_key(text: str) -> str | None:
    """Find a key that a YAML mapping, or one in a list of it, has twice: YAML's readers keep the last value. None: there is none."""
    import yaml

    root = yaml.compose(text, yaml.SafeLoader)
    values = [value for _, value in root.value] if isinstance(root, yaml.MappingNode) else []
    items = [item for value in values if isinstance(value, yaml.SequenceNode) for item in value.value]
    for node in (root, *items):
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        if doubled := next((key for key in keys if keys.count(key) > 1), None):
            return str(doubled)
    return None
