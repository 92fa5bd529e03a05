"""Declares options as the fields of a frozen dataclass, with default, help text and limits, and refuses invalid values.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class CommOptions:
        ranks: int = option(2, "number of processes", least=2)

``option_flags`` makes the flags of such a class, and reads them.
"""

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any

MAX_SECONDS = 1e6  # eleven days: no clock or timer overflows at such a deadline
REQUIRED: Any = MISSING  # as the default of an ``option`` that must be given


def option(
    default: Any,
    help: str,
    choices: Sequence[str] = (),
    metavar: str = "",
    *,
    parse: Callable[[str], Any] | None = None,
    flag: str = "",
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    unique: bool = False,
    repeated: bool = False,
    nargs: str | None = None,
    const: Any = None,
    default_factory: Callable[[], Any] | None = None,
) -> Any:
    """Declare an option.

    Args:
        help: shown with the default; where that is None or (), the text says what happens without the flag.
        metavar: the placeholder in --help; by default that of the field's type. With BYTES in it, --help shows numbers as sizes.
        parse: makes the value from its text. Without it the field's type does: str, int, float, bool, Path, or a tuple of str,
            int or float, separated by commas.
        flag: by default the field's name with dashes. Without leading dashes it is a positional argument.
        least, most, above: limits of a number, or of each number of a tuple; ``least`` and ``above`` also refuse infinity.
        unique: keeps each value of a tuple once.
        repeated: the flag may be given several times, and a YAML file may have a list.
        nargs, const: argparse's, for a flag that takes several values, and for the value of a flag without an argument.
        default_factory: makes the default of each run; ``default`` is then ignored.
    """
    if const is not None or (flag and not flag.startswith("-") and default is not REQUIRED):
        nargs = "?"
    metadata = {"help": help, "choices": tuple(choices), "metavar": metavar, "parse": parse, "flag": flag}
    metadata |= {"least": least, "most": most, "above": above, "unique": unique}
    metadata |= {"repeated": repeated, "nargs": nargs, "const": const}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(cls: type) -> dict[str, Field[Any]]:
    """The fields of a dataclass that are options, by name."""
    return {own.name: own for own in fields(cls) if "help" in own.metadata}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def require(ok: bool, name: str, value: object, want: str) -> None:
    """Raise ValueError unless ``ok``: names the option's flag, its ``value`` and what it must be."""
    if not ok:
        given = ",".join(map(str, value)) if isinstance(value, tuple) else repr(value)
        raise ValueError(f"{flag_of(name)} must be {want}, got {given}")


@contextlib.contextmanager
def naming_flag(name: str) -> Iterator[None]:
    """Put the option's flag before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag_of(name)}: {error}") from None


def require_seconds(name: str, value: float) -> None:
    require(0 < value <= MAX_SECONDS, name, value, f"above 0 and at most {MAX_SECONDS:g}")


def require_declared(options: Any) -> None:
    """Raise ValueError unless each value of an instance of such a class is one of its choices, and within its limits."""
    for own in fields(options):
        value, choices = getattr(options, own.name), own.metadata["choices"]
        require(not choices or value in choices, own.name, value, f"one of {', '.join(choices)}")
        if isinstance(value, int | float) and (want := limits_missed(own, value)):
            require(False, own.name, value, want)


def limits_missed(own: Field[Any], value: float) -> str:
    """Describe the limits that a number of the option ``own`` is not within; empty if it is. NaN is within none."""
    least, most, above = (own.metadata[name] for name in ("least", "most", "above"))
    if above is not None and not above < value < math.inf:
        return f"above {above:g}"
    if (least is None or least <= value < math.inf) and (most is None or value <= most):
        return ""
    if least is None or most is None:
        return f"at most {most:g}" if least is None else f"at least {least:g}" + " and finite" * (value == math.inf)
    return f"{least:g} to {most:g}"


def as_utf8(text: str) -> str:
    """``text`` of an argument or of standard input, read as UTF-8 where the locale is not. ValueError: it is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:  # it has bytes that the locale's encoding could not read
        try:
            return os.fsencode(text).decode()
        except UnicodeError:
            raise ValueError(f"{text!r} is not UTF-8; give text in UTF-8") from None
    return text


def suggest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a message about an unknown ``name``: the nearest known one; else ``otherwise``, by default all known."""
    known = sorted(known)
    # The dashes of two flags, and the /v1 of two routes, would count as likeness.
    bare = {other.strip("-").removeprefix("/v1"): other for other in known}
    if close := difflib.get_close_matches(name.strip("-").removeprefix("/v1"), bare, n=1, cutoff=0.7):
        return f"; did you mean {bare[close[0]]!r}?"
    return f"; known are {', '.join(known)}" if otherwise is None else otherwise
