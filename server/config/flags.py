"""Derives flags and YAML keys from the fields of ``config``. A flag overrides the file, and the file the default."""

import argparse
import contextlib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from itertools import chain
from pathlib import Path
from typing import Any

from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.server.config.foreign_flags import ours
from tightwire.server.config.serve import GROUPS, ServeConfig, option_fields
from tightwire.sizes import format_bytes, parse_bytes
from tightwire.suggest import suggest

Fields = Mapping[str, Field[Any]]

ALL_GROUPS = tuple(GROUPS)
_MODEL_ARGUMENT = "model_argument"  # the model without its flag: `tightwire serve MODEL`


def fields_of(groups: Iterable[str]) -> dict[str, Field[Any]]:
    """The options of some groups of ``ServeConfig``, by field name."""
    return {name: field for name, (group, field) in option_fields().items() if group in groups}


def make_parser(
    verb: str, description: str, groups: Sequence[str] = ALL_GROUPS, *, argument: str = "[MODEL]"
) -> argparse.ArgumentParser:
    """A parser with every option of ``groups`` and ``--config``. ``argument``: ``[MODEL]``, or one that the caller adds."""
    parser = argparse.ArgumentParser(
        prog=f"tightwire {verb}",
        usage=f"tightwire {verb} {argument} [--FLAG VALUE ...] [--config FILE]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    if argument == "[MODEL]":
        parser.add_argument(_MODEL_ARGUMENT, nargs="?", metavar="MODEL", help="the same as --model MODEL")
    for group in groups:
        add_flags(parser.add_argument_group(group, GROUPS[group].__doc__), fields_of([group]))
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a YAML file with the same names as the flags, which override it"
    )
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], groups: Sequence[str] = ALL_GROUPS
) -> tuple[ServeConfig, argparse.Namespace]:
    """The options, and all arguments including those the caller added. Invalid ones exit with code 2."""
    args = parse_flags(parser, argv)
    if _MODEL_ARGUMENT in args:
        if "model" in args:
            parser.error(f"two models given: {args.model_argument} and --model {args.model}")
        args.model = args.model_argument
    fields = fields_of(groups)
    try:
        values = read_yaml(args.config, fields) if "config" in args else {}
        values |= {name: value for name, value in vars(args).items() if name in fields}
        if len(names := values.get("served_model_name", ())) > 1 and "model" not in values:
            raise ValueError(
                f"--served-model-name takes {' and '.join(names)}, and no MODEL is left; write MODEL before it"
            )
        return make_config(values), args
    except ValueError as error:
        parser.error(str(error))


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """All arguments. Unknown ones exit with code 2, and name the flag that was probably meant."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in argv:  # first, because argparse reads `-hf` as `-h`
        flag = word.split("=")[0]
        if flag not in known and (text := ours(flag, known)) is not None:
            parser.error(f"unknown argument {flag!r}{text}")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].split("=")[0]
        hint = suggest(flag, known, f"; `{parser.prog} --help` lists the flags")
        if flag in ("--" + name.replace("_", "-") for name in option_fields()):
            hint = "; it is a flag of `tightwire serve`"
        parser.error(f"unknown argument {unknown[0]!r}{hint}")
    return args


def refuse_serving_flags(parser: argparse.ArgumentParser, config: ServeConfig) -> None:
    """For verbs without requests: end the program with exit code 2 if a flag is about requests."""
    if config.parallel.allreduce_extra:
        parser.error("--allreduce-extra is for requests to `serve`; leave it out, or name one with --allreduce")
    if config.parallel.dp > 1:
        parser.error(f"--dp {config.parallel.dp} is for requests to `serve`, which replicas share; leave it out")


def make_config(values: Mapping[str, Any]) -> ServeConfig:
    """The config tree with some options set by field name. ValueError: an option group refuses a value."""
    by_group: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, value in values.items():
        by_group[option_fields()[name][0]][name] = value
    return ServeConfig(**{group: cls(**by_group[group]) for group, cls in GROUPS.items()})


def add_flags(parser: argparse._ActionsContainer, fields: Fields) -> None:
    """Add one argument per field. Arguments not given are absent from the result, so that a file can set them."""
    for name, field in fields.items():
        kind, choices = _kind(field)[0], field.metadata["choices"]
        given: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if kind is not bool:
            metavar = field.metadata["metavar"] or (None if choices else kind.__name__.upper())
            given = {"type": _flag_type(field), "choices": choices or None, "metavar": metavar}
        if field.metadata.get("repeated"):
            given |= {"action": _Append, "nargs": field.metadata["nargs"]}
        parser.add_argument("--" + name.replace("_", "-"), help=_help(field), default=argparse.SUPPRESS, **given)


class _Append(argparse.Action):
    """Joins the tuples of a flag that is given several times, or that takes several values."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        new = chain.from_iterable(values) if self.nargs else values
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *new))


def read_yaml(path: Path, fields: Fields) -> dict[str, Any]:
    """Options from a flat YAML mapping, by field name. ValueError: names what is wrong with the file."""
    import yaml  # saves `--help` 20 ms

    try:
        text = path.read_text()
        content, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"--config {path}: {_wrong('`name: value` lines', content)}")
    keys = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    if doubled := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"--config {path}: {doubled[0]!r} is given twice")
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


def convert(field: Field[Any], value: object) -> Any:
    """A flag's text or a YAML value, converted to the field's annotated type; ValueError if that is not possible."""
    kind, optional = _kind(field)
    if value is None and optional:
        return None
    if (parse := field.metadata.get("parse")) is not None:
        return value if isinstance(value, kind) else parse(str(value))
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}, got {value!r}")
    if kind is int and field.metadata["metavar"] == "BYTES" and isinstance(value, str):
        return parse_bytes(value)
    if kind is not tuple:
        return _plain(kind, value)
    texts = str in typing.get_args(field.type)
    if isinstance(value, str) and field.metadata.get("repeated"):
        value = [value]
    elif isinstance(value, str):
        value = split_all_reduce_names(value) if texts else value.split(",")
    parts = value if isinstance(value, (list, tuple)) else [value]
    if texts and not all(isinstance(part, str) and part for part in parts):
        raise _wrong(
            "names with commas between",
            next(part for part in parts if not part or not isinstance(part, str)),
        )
    return tuple(_plain(str if texts else float, part) for part in parts)


_KIND_NAMES: dict[type, str] = {
    str: "text (in quotes)",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def _plain(kind: type, value: object) -> Any:
    """``value`` as ``kind``. Text is read as a number; a bool is not one, and a fraction is no int."""
    if kind not in (int, float):
        if isinstance(value, kind):
            return value
    elif isinstance(value, str) or (isinstance(value, (int, kind)) and not isinstance(value, bool)):
        with contextlib.suppress(ValueError):
            return kind(value)
    raise _wrong(_KIND_NAMES[kind], value)


def _wrong(want: str, value: object) -> ValueError:
    return ValueError(f"must be {want}, got {value!r}")


def _kind(field: Field[Any]) -> tuple[type, bool]:
    """The plain type of a field's annotation (``int`` for ``int | None``), and whether None is allowed."""
    assert not isinstance(field.type, str), "config modules do not postpone annotations"
    members = typing.get_args(field.type) if typing.get_origin(field.type) is not tuple else ()
    optional = type(None) in members
    kind = next(member for member in members if member is not type(None)) if optional else field.type
    return typing.get_origin(kind) or kind, optional


def _flag_type(field: Field[Any]) -> typing.Callable[[str], Any]:
    def from_text(text: str) -> Any:
        try:
            return convert(field, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return from_text


def _help(field: Field[Any]) -> str:
    """The field's help text with its default, unless that is None."""
    text = field.metadata["help"].replace("%", "%%")
    default: Any = field.default
    if default in (None, ()):
        return text
    return f"{text} (default: {format_bytes(default) if field.metadata['metavar'] == 'BYTES' else default})"
