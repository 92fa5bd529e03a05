"""Finds every AllReduce by name: a file of this folder with an ``ENTRY`` is an algorithm."""

from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from tightwire.comm import all_reduce
from tightwire.comm.all_reduce.entry import Entry, split_name
from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import AllReduce


def _find_entries() -> list[Entry]:
    modules = [import_module(f"{all_reduce.__name__}.{found.name}") for found in iter_modules(all_reduce.__path__)]
    entries = [module.ENTRY for module in modules if hasattr(module, "ENTRY")]
    return sorted(entries, key=lambda entry: (entry.preference, entry.name))


ALL_REDUCE: dict[str, Entry] = {
    "auto": Entry(name="auto", make="tightwire.comm.policy.routes:auto_all_reduce"),
    **{entry.name: entry for entry in _find_entries()},
}


@dataclass(frozen=True, slots=True)
class AllReduceName:
    """A parsed, valid name. ``codecs``: the constructor's arguments after the group."""

    name: str
    entry: Entry
    codecs: tuple[Codec, ...] = ()

    @property
    def lossless(self) -> bool:
        return all(codec.exact for codec in self.codecs)


def lossless_names() -> list[str]:
    """The names that ``auto`` may consider, in order of preference."""
    return [name for name, entry in ALL_REDUCE.items() if entry.exact_codecs is not None and entry.work is not None]


def lossy_names(suffix: str) -> list[str]:
    """Quantized names worth measuring, for codecs with this ``suffix``."""
    found = [entry.lossy_names(suffix) for entry in ALL_REDUCE.values() if entry.lossy_names is not None]
    return [name for names in found for name in names]


def parse_all_reduce(name: str) -> AllReduceName:
    """Parse ``name``, without a group. Raises ValueError for other names; lists the valid forms."""
    family, codecs = split_name(name)
    return AllReduceName(name, ALL_REDUCE[family], tuple(parse_codec(codec, feedback=True) for codec in codecs))


def make_all_reduce(name: str, group: Group) -> AllReduce:
    """Make the algorithm ``name`` over ``group``; all ranks make the same one. Raises ValueError for other names."""
    parsed = parse_all_reduce(name)
    make = parsed.entry.make
    if isinstance(make, str):
        module, attribute = make.split(":")
        make = getattr(import_module(module), attribute)
    return make(group, *parsed.codecs, name=name) if parsed.codecs else make(group)
