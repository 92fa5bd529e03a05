"""Suggests the nearest known name for an unknown one."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a message about an unknown ``name``: the nearest known one; else ``otherwise``, by default all known."""
    known = sorted(known)
    bare = {other.strip("-"): other for other in known}  # the dashes of two flags would count as likeness
    if close := difflib.get_close_matches(name.strip("-"), bare, n=1, cutoff=0.7):
        return f"; did you mean {bare[close[0]]!r}?"
    return f"; known are {', '.join(known)}" if otherwise is None else otherwise
