"""Declares the options of a bench once: the fields of a frozen dataclass are its command-line flags.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class CommOptions(OutputOptions):
        ranks: int = option(2, "processes, one thread each", least=2)

A ValueError of a field's ``parse`` or of ``__post_init__`` ends the program with exit code 2 and its message.
"""

import argparse
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from tightwire.bench.report.result_files import check_label
from tightwire.comm.link.link import Link
from tightwire.server.config.flags import convert, parse_flags
from tightwire.sizes import format_bytes, parse_bytes

TRANSPORTS = ("auto", "shared-memory", "sockets", "process-group", "peer-memory")
LAST_LINE = "In a pipe or a file the last line of stdout is one JSON object."
REQUIRED: Any = MISSING  # as the default of an ``option`` that must be given


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    metavar: str = "",
    parse: Callable[[str], Any] | None = None,
    flag: str = "",
    least: float | None = None,
    above: float | None = None,
    const: Any = None,
    default_factory: Callable[[], Any] | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    Args:
        help: shown with the default; where the default is None or (), the text says what happens without the flag.
        metavar, parse: the placeholder in --help, and a function of the flag's text; default: by the field's type, which may
            be str, int, float, bool, Path, or a tuple of str, int or float, separated by commas.
        flag: default: the field's name with dashes. Without leading dashes: a positional argument.
        least, above: limits of a given number, or of each number of a tuple; ``above`` also refuses infinity.
        const: the value of the flag without an argument.
        default_factory: makes the default of each run; ``default`` is then ignored.
    """
    metadata = {"help": help, "choices": tuple(choices), "metavar": metavar, "parse": parse, "flag": flag}
    metadata |= {"least": least, "above": above, "const": const}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """The options of every bench; its own options class inherits them, in a file that imports no torch."""

    description: ClassVar[str] = ""  # for --help
    output: Path | None = option(  # noqa: RUF009
        None, "write the result to this folder: JSON with raw samples, CSV, HTML page", metavar="DIR"
    )
    label: str | None = option(
        None, "beginning of the names of those files (default: the bench's name)", metavar="NAME", parse=check_label
    )
    json: bool = option(False, "end with one JSON object on a line also on a terminal, as in a pipe or a file")

    @classmethod
    def from_argv(cls, argv: Sequence[str], *, verb: str) -> Self:
        """The options on a command line. Invalid ones print the reason and exit with code 2."""
        parser = argparse.ArgumentParser(
            prog=f"tightwire bench {verb}", description=f"{cls.description} {LAST_LINE}", allow_abbrev=False
        )
        add_flags(parser, cls)
        given = parse_flags(parser, argv)
        try:
            return cls(**given_options(given, cls))
        except ValueError as error:
            parser.error(str(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """The number of ranks and their connection; raises ValueError for values that do not fit together."""

    ranks: int = 2
    nodes: int | None = None  # None: 1, or with a link one node for each rank
    device: str = "cpu"
    transport: str = "auto"
    link: Link | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.nodes is not None and (self.nodes < 1 or self.ranks % self.nodes):
            raise ValueError(f"--nodes must divide the {self.ranks} ranks evenly, got {self.nodes}")
        if self.link is not None and self.num_nodes < 2:
            raise ValueError("--link is between nodes, so --nodes must be at least 2")
        if self.link is not None and (self.transport == "shared-memory" or self.device != "cpu"):
            raise ValueError(
                "--link connects CPU processes by sockets; give --transport sockets or process-group, or neither"
            )
        if self.device != {"peer-memory": "cuda", "shared-memory": "cpu", "sockets": "cpu"}.get(
            self.transport, self.device
        ):
            raise ValueError(f"--transport {self.transport} is not for --device {self.device}")

    @property
    def num_nodes(self) -> int:
        return self.nodes or (1 if self.link is None else self.ranks)

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.num_nodes


def add_flags(parser: argparse._ActionsContainer, cls: type) -> None:
    """Add a flag for each ``option`` field of ``cls``. A flag that is not given sets nothing in the namespace."""
    for own in _option_fields(cls):
        metadata = own.metadata
        flag = metadata["flag"] or "--" + own.name.replace("_", "-")
        settings: dict[str, Any] = {"help": _help(own), "default": argparse.SUPPRESS}
        if flag.startswith("-"):
            settings["dest"] = own.name
            if metadata["const"] is not None:
                settings |= {"nargs": "?", "const": metadata["const"]}
        elif own.default is not MISSING:
            settings["nargs"] = "?"
        if _type_of(own) is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **settings)
        else:
            has_own = metadata["choices"] or not flag.startswith("-")
            metavar = metadata["metavar"] or (None if has_own else _METAVARS.get(_type_of(own)))
            settings |= {"choices": metadata["choices"] or None, "metavar": metavar}
            parser.add_argument(flag, type=_converter(own), **settings)


def given_options(given: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The options of ``cls`` that were on the command line, by field name."""
    return {own.name: getattr(given, own.name) for own in _option_fields(cls) if hasattr(given, own.name)}


def parse_sizes(text: str) -> tuple[int, ...]:
    """``8KiB,1MiB`` in bytes, sorted, each once."""
    return tuple(sorted({parse_bytes(part) for part in text.split(",")}))


def parse_integers(text: str) -> tuple[int, ...]:
    return tuple(_parse_all(int, "whole numbers", text))


def parse_numbers(text: str) -> tuple[float, ...]:
    return tuple(_parse_all(float, "numbers", text))


def parse_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parse_all(kind: Callable[[str], Any], what: str, text: str) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"expected {what} separated by commas, such as 1,16, got {text!r}") from None


_PARSERS: dict[Any, Callable[[str], Any]] = {
    Path: Path,
    tuple[str, ...]: parse_names,
    tuple[int, ...]: parse_integers,
    tuple[float, ...]: parse_numbers,
}
_METAVARS: dict[Any, str] = {
    int: "N",
    float: "X",
    str: "NAME",
    Path: "PATH",
    tuple[str, ...]: "NAME,NAME",
    tuple[int, ...]: "N,N",
    tuple[float, ...]: "X,X",
}


def _option_fields(cls: type) -> list[Field[Any]]:
    """The base class's fields last."""
    common = {own.name for own in fields(OutputOptions)}
    return sorted((own for own in fields(cls) if "help" in own.metadata), key=lambda own: own.name in common)


def _type_of(own: Field[Any]) -> Any:
    members = [member for member in typing.get_args(own.type) if member is not type(None)]
    return members[0] if type(None) in typing.get_args(own.type) and len(members) == 1 else own.type


def _converter(own: Field[Any]) -> Callable[[str], Any]:
    parse = own.metadata["parse"] or _PARSERS.get(_type_of(own)) or (lambda text: convert(own, text))
    least, above = own.metadata["least"], own.metadata["above"]

    def from_text(text: str) -> Any:
        try:
            value = parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        for number in value if isinstance(value, tuple) else (value,):
            if least is not None and not number >= least:
                raise argparse.ArgumentTypeError(f"must be at least {least:g}, got {number:g}")
            if above is not None and not above < number < math.inf:
                raise argparse.ArgumentTypeError(f"must be above {above:g}, got {number:g}")
        return value

    return from_text


def _help(own: Field[Any]) -> str:
    text = own.metadata["help"].replace("%", "%%")
    default: Any = own.default
    if default in (None, (), "", math.inf, MISSING) or isinstance(default, (bool, Mapping)):
        return text
    values = default if isinstance(default, tuple) else (default,)
    return f"{text} (default: {','.join(_show(value, own.metadata['metavar']) for value in values)})"


def _show(value: object, metavar: str) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return format_bytes(value) if isinstance(value, int) and "SIZE" in metavar else str(value)
