"""The registry entry of an AllReduce, and the names, read from source text because the entries import torch."""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tightwire.comm.codec.codec_names import has_feedback, parse_format

if TYPE_CHECKING:  # settings are read in processes that do not import torch
    from tightwire.comm.codec.codec import Codec
    from tightwire.comm.protocols import AllReduce

ELEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
RANK_ORDER, NODE_ORDER = "in rank order", "node by node"


class Setting(msgspec.Struct, frozen=True):
    """The conditions of a predicted or measured time, beside the algorithm and the size."""

    transport: str
    device: str  # cpu or cuda
    world_size: int
    num_nodes: int
    dtype: str
    link: str = ""  # the emulated link between the nodes

    @property
    def elem_bytes(self) -> int:
        return ELEM_BYTES[self.dtype]

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        behind = f", link: {self.link}" if self.link else ""
        return f"{self.world_size} ranks{nodes}, {self.dtype} on {self.device} over {self.transport}{behind}"


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one rank in one AllReduce; the cost model multiplies it by a link's constants."""

    rounds: int
    sent_bytes: float
    summed_elems: float = 0  # added without decoding
    encoded_elems: float = 0  # each weighted by ``coding_effort``
    decoded_elems: float = 0
    node_rounds: int = 0  # between nodes, over another transport
    node_bytes: float = 0
    node_summed_elems: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One algorithm. A name is ``name`` itself, a preset, or, for ``num_codecs`` > 0, ``name:CODEC,...``."""

    name: str
    make: "Callable[..., AllReduce] | str"  # (group) or (group, *codecs, name=...); "module:attribute": see registry
    work: Callable[..., Work] | None = None  # (setting, message bytes, *codecs): what one rank does
    wire_bytes: Callable[..., int] | None = (
        None  # the same arguments: bytes of rank 0; None: from ``work``, up to rounding
    )
    num_codecs: int = 0  # how many codecs the constructor takes
    patterns: Mapping[str, str] = field(default_factory=dict)  # the forms with codecs, each with its explanation
    presets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names with fixed codecs
    lossy_names: Callable[[str], list[str]] | None = (
        None  # names worth measuring, for a suffix of codecs such as ``-g64``
    )
    exact_codecs: tuple[str, ...] | None = ()  # the codecs of the bare ``name``; None: it needs codecs and is not valid
    order: str = RANK_ORDER  # of adding; algorithms with equal order give the same bits
    depends_on_place: bool = False  # with three or more ranks on CPU the order depends on an element's place
    takes_feedback: bool = False  # its codecs may carry errors from sum to sum
    needs_nodes: bool = False  # useful on several nodes only
    rounds: Literal["kernel", "message", "library"] = (
        "kernel"  # one kernel where memory is shared; messages; gloo or NCCL
    )
    neighbours_only: bool = False  # each rank sends to the next only, so one rank of a node uses the link between nodes
    preference: int = 100  # the lowest wins among equally fast ones

    def refusal(self, setting: Setting) -> str | None:
        """Return why ``auto`` may not use the exact form in this setting; None: it may."""
        if self.needs_nodes and setting.num_nodes == 1:
            return "on one node it is the same as two-shot"
        if self.rounds == "library" and setting.transport == "sockets":
            return "gloo would open connections of its own, on ports that a firewall may block"
        if self.depends_on_place and setting.world_size > 2 and setting.device == "cpu":
            return "sums depend on an element's place, so a text would depend on other requests"
        return None


def coded_elem_bytes(codec: "Codec", setting: Setting) -> float:
    return codec.wire_bytes(codec.group_elems, setting.elem_bytes) / codec.group_elems


def coding_effort(codec: "Codec") -> float:
    """The time of ``codec`` relative to int8, as measured by `tightwire bench kernels`; 0 for an exact codec."""
    fmt = codec.format
    if fmt is None:
        return 0.0
    if fmt.hadamard:
        return 2.4 if codec.feedback else 2.1
    return (1.9 if len(fmt.plane_bits) > 1 else 1.0) * _GROUP_EFFORT[fmt.group_elems]


_GROUP_EFFORT = {128: 1.0, 64: 1.2, 32: 1.7}


def split_all_reduce_names(text: str) -> tuple[str, ...]:
    """Split at commas and strip blanks; the comma inside ``flash:RS,AG`` does not separate names."""
    names: list[str] = []
    for part in map(str.strip, text.split(",")):
        if names and names[-1].startswith("flash:") and "," not in names[-1]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return tuple(names)


class Declared(msgspec.Struct, frozen=True):
    """The fields of ``entry.Entry`` that decide which names are valid, with their defaults."""

    num_codecs: int = 0
    takes_feedback: bool = False
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


def all_reduce_names() -> list[str]:
    """All names without explicit codecs, for tests, self-tests and benchmarks."""
    bare = [name for name, entry in declared().items() if entry.num_codecs and entry.exact_codecs is not None]
    return [*plain_names(), *preset_names(), *bare]


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
        if has_feedback(codec) and not entry.takes_feedback:
            raise ValueError(f"{name!r}: {family} has no error feedback (-ef), only flash has; leave -ef out")
    return family, codecs


def is_lossless(name: str) -> bool:
    """True if no codec of the AllReduce ``name`` rounds. Raises ValueError as ``split_name``."""
    return all(parse_format(codec) is None for codec in split_name(name)[1])
