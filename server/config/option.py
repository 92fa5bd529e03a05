"""One option of a group: its default and, in the field's metadata, its help text; and how a value is refused."""

from dataclasses import field
from typing import Any

MAX_SECONDS = 1e6  # eleven days: a deadline that no clock or timer overflows at


def option(default: Any, help: str, choices: tuple[str, ...] = (), metavar: str = "") -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


def require(ok: bool, name: str, value: object, want: str) -> None:
    """Raises:
    ValueError: not ``ok``; with the flag of option ``name``, its ``value`` and what it must be.
    """
    if not ok:
        flag = "--" + name.replace("_", "-")
        raise ValueError(f"{flag} must be {want}, got {value!r}")


def require_seconds(name: str, value: float) -> None:
    require(0 < value <= MAX_SECONDS, name, value, f"above 0 and at most {MAX_SECONDS:g}")
