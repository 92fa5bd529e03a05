"""An AllReduce as the rest of the project knows it: names, cost, bytes, and when ``auto`` may use it. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

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
    coded: bool = False  # long messages between nodes are coded without loss (``transport.wire_codec``)

    @property
    def elem_bytes(self) -> int:
        return ELEM_BYTES[self.dtype]

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        behind = f", link: {self.link}" if self.link else ""
        return f"{self.world_size} ranks{nodes}, {'coded-' * self.coded}{self.dtype} on {self.device} over {self.transport}{behind}"


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
    """One algorithm; with ``codecs``, one of its names.

    ``names.NAMES`` holds the names of every algorithm. The algorithm's file adds the rest to its row, as ``ENTRY``, and
    ``make.parse_all_reduce`` adds the codecs of the name it is given.
    """

    name: str
    module: str = ""  # the file with the rest of the entry
    num_codecs: int = 0  # how many codecs the constructor takes: a name is then ``name:CODEC,...`` or a preset
    patterns: Mapping[str, str] = field(default_factory=dict)  # the forms with codecs, each with its explanation
    presets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names with fixed codecs
    exact_codecs: tuple[str, ...] | None = ()  # the codecs of the bare ``name``; None if it is not valid without codecs
    takes_feedback: bool = False  # its codecs may carry errors from sum to sum

    make: "Callable[..., AllReduce] | None" = None  # (group) or (group, *codecs, name=...)
    work: Callable[..., Work] | None = None  # (setting, message bytes, *codecs) -> what one rank does
    wire_bytes: Callable[..., int] | None = None  # (setting, message bytes, *codecs) -> bytes that rank 0 sends;
    # without it they are approximated from ``work``
    # (suffix of codecs such as ``-g64``) -> names worth measuring
    lossy_names: Callable[[str], list[str]] | None = None
    order: str = RANK_ORDER  # order of adding; algorithms with equal order give the same bits
    depends_on_place: bool = False  # with three or more ranks on CPU the order depends on an element's place
    needs_nodes: bool = False  # useful on several nodes only
    rounds: Literal["kernel", "message", "library"] = "kernel"  # one kernel over shared memory, messages, gloo or NCCL
    neighbours_only: bool = False  # each rank sends to the next only, so one rank of a node uses the link between nodes
    preference: int = 100  # the lowest wins among equally fast ones

    codecs: "tuple[Codec, ...]" = ()  # the constructor's arguments after the group

    @property
    def lossless(self) -> bool:
        return all(codec.exact for codec in self.codecs)

    def refusal(self, setting: Setting) -> str | None:
        """Return why ``auto`` may not use the exact form in this setting, or None if it may."""
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


@dataclass(frozen=True, slots=True)
class SelfTestVerdict:
    """The result for one algorithm that a policy may use; ``detail`` has the sizes checked, or the first rank that found an error, and the error."""

    algorithm: str
    ok: bool
    detail: str
