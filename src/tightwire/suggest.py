"""Suggests the nearest known name for an unknown one."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a message about an unknown ``name``: the nearest known one; else ``otherwise``, by default all known."""
    known = sorted(known)
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known are {', '.join(known)}" if otherwise is None else otherwise
