"""The AllReduces behind the names: entries of all algorithms, and the functions that parse a name or make its AllReduce."""

from dataclasses import replace
from functools import cache
from importlib import import_module

from tightwire.comm.all_reduce.entry import Entry
from tightwire.comm.all_reduce.names import NAMES, split_name
from tightwire.comm.codec.codec import parse_codec
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce

_AUTO = "auto"  # an algorithm of ``policy``, which imports this file; so its module is imported when it is made


def _import_entries() -> list[Entry]:
    entries: list[Entry] = [import_module(row.module).ENTRY for row in NAMES.values() if row.name != _AUTO]
    return sorted(entries, key=lambda entry: (entry.preference, entry.name))


ALL_REDUCE: dict[str, Entry] = {_AUTO: NAMES[_AUTO], **{entry.name: entry for entry in _import_entries()}}


def lossless_names() -> list[str]:
    """The names that ``auto`` may consider, in order of preference."""
    return [name for name, entry in ALL_REDUCE.items() if entry.exact_codecs is not None and entry.work is not None]


def lossy_names(suffix: str) -> list[str]:
    """Quantized names worth measuring, for codecs with this ``suffix``."""
    found = [entry.lossy_names(suffix) for entry in ALL_REDUCE.values() if entry.lossy_names is not None]
    return [name for names in found for name in names]


@cache  # planning asks for each a hundred thousand times
def parse_all_reduce(name: str) -> Entry:
    """The entry of ``name`` with its codecs, without a group. Raises ValueError for other names; lists the valid forms."""
    family, codecs = split_name(name)
    return replace(ALL_REDUCE[family], name=name, codecs=tuple(parse_codec(codec, feedback=True) for codec in codecs))


def make_all_reduce(name: str, group: Group) -> AllReduce:
    """Make the algorithm ``name`` over ``group``; all ranks make the same one. Raises ValueError for other names."""
    entry = parse_all_reduce(name)
    make = entry.make or import_module(entry.module).ENTRY.make
    return make(group, *entry.codecs, name=name) if entry.codecs else make(group)
