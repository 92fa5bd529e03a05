"""The names of AllReduces, read from the source text of this folder, because importing the entries imports torch."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tightwire.comm.codec.codec_names import parse_format


class Declared(msgspec.Struct, frozen=True):
    """The fields of ``entry.Entry`` that decide which names are valid, with their defaults."""

    num_codecs: int = 0
    patterns: dict[str, str] = {}
    presets: dict[str, tuple[str, ...]] = {}
    exact_codecs: tuple[str, ...] | None = ()


@cache
def declared() -> dict[str, Declared]:
    """Every algorithm by name, without ``auto``. The fields are literals or constants of the same file."""
    found: dict[str, Declared] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        constants: dict[str, Any] = {}
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign) or not isinstance(target := node.targets[0], ast.Name):
                continue
            if target.id == "ENTRY" and isinstance(node.value, ast.Call):
                given = {str(word.arg): _value(word.value, constants) for word in node.value.keywords}
                kept = {name: given[name] for name in Declared.__struct_fields__ if name in given}
                found[given["name"]] = Declared(**kept)
            elif isinstance(node.value, ast.Dict):
                constants[target.id] = _value(node.value, {})
    return found


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    """The value of a literal or of a constant's name; None for anything else."""
    try:
        return constants.get(node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)
    except ValueError:
        return None


def plain_names() -> list[str]:
    """The names of algorithms that take no codecs; all are lossless."""
    return sorted(["auto", *(name for name, entry in declared().items() if not entry.num_codecs)])


def preset_names() -> list[str]:
    return [name for entry in declared().values() for name in entry.presets]


def describe_all_reduce_names() -> str:
    patterns = [pattern for entry in declared().values() for pattern in entry.patterns]
    return f"{', '.join([*plain_names(), *preset_names(), *patterns])} (with codecs such as int8, int4-g32, none)"


def split_name(name: str) -> tuple[str, tuple[str, ...]]:
    """The algorithm that ``name`` means, and the names of its codecs. Raises ValueError with the valid forms."""
    for family, entry in declared().items():
        if name in entry.presets:
            return family, entry.presets[name]
    family, colon, given = name.partition(":")
    entry = Declared() if family == "auto" else declared().get(family)
    if entry is None or (colon and not entry.num_codecs) or (not colon and entry.exact_codecs is None):
        raise ValueError(f"unknown all-reduce {name!r}; choose one of {describe_all_reduce_names()}")
    if not colon:
        return family, entry.exact_codecs or ()
    codecs = (given,) if entry.num_codecs == 1 else tuple(given.split(","))
    if len(codecs) != entry.num_codecs:
        raise ValueError(
            f"{name!r} needs two codecs, for the reduce-scatter and the all-gather leg, such as flash:int4,int8"
        )
    for codec in codecs:
        try:
            parse_format(codec)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    return family, codecs
