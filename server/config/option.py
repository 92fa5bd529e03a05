"""Declares one option of a group, with its default and help text, and refuses invalid values."""

from collections.abc import Callable
from dataclasses import field
from typing import Any

MAX_SECONDS = 1e6  # eleven days: no clock or timer overflows at such a deadline


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    *,
    repeated: bool = False,
    nargs: str | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """Declare an option.

    ``repeated``: the flag may be given several times, and a YAML file may have a list. ``nargs``: argparse's, for a flag that
    takes several values. ``parse``: the function that makes the value from its text.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar} | {
        "repeated": repeated,
        "nargs": nargs,
        "parse": parse,
    }
    return field(default=default, metadata=metadata)


def require(ok: bool, name: str, value: object, want: str) -> None:
    """Raise ValueError unless ``ok``: names the option's flag, its ``value`` and what it must be."""
    if not ok:
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"{flag} must be {want}, got {value!r}")


def require_seconds(name: str, value: float) -> None:
    require(0 < value <= MAX_SECONDS, name, value, f"above 0 and at most {MAX_SECONDS:g}")
