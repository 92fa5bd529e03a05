"""What an AllReduce costs: predicted from rounds, bytes and quantization, or measured on this host where it was.

    us = call + rounds * round + sent bytes * byte + summed elements * sum
         (+ coded call + encoded elements * encode + decoded elements * decode)

The constants of a ``LinkCost`` are seeds: good enough to tell apart algorithms that differ much. ``tightwire tune`` replaces
the prediction by what it measured. Behind an emulated wire (``serve --link``) bytes between nodes cost what that wire's
own rate says, and rounds its latency more. Source of the model: Thakur, Rabenseifner and Gropp, Optimization of Collective
Communication Operations in MPICH, 2005.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from tightwire.comm.all_reduce.flash import flash_bytes
from tightwire.comm.all_reduce.two_shot import two_shot_bytes
from tightwire.comm.codec import Codec
from tightwire.comm.link.link import Link
from tightwire.comm.registry import AllReduceName, parse_all_reduce

ELEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIB = 1 << 20


class Setting(msgspec.Struct, frozen=True):
    """What a measured time belongs to, beside the algorithm and the size."""

    transport: str
    device: str  # cpu or cuda
    world_size: int
    num_nodes: int
    dtype: str
    link: str = ""  # the emulated wire between the nodes

    @property
    def elem_bytes(self) -> int:
        return ELEM_BYTES[self.dtype]

    def __str__(self) -> str:
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        behind = f" behind {self.link}" if self.link else ""
        return f"{self.world_size} ranks{nodes}, {self.dtype} on {self.device} over {self.transport}{behind}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """Seeds for one way ranks reach each other, in microseconds; ``*_mib`` per MiB sent, ``*_melem`` per 2^20 elements."""

    call: float
    coded_call: float  # on top, for an algorithm that encodes
    round: float  # of one-shot, two-shot and flash, which are one kernel where memory is shared
    message_round: float  # of those that always go message by message
    mib: float
    native_round: float
    native_mib: float
    encode_melem: float  # int8 and int4 in groups of 128; ``_effort`` says what others take
    decode_melem: float
    sum_melem: float = 0.0  # adding exactly, where ``mib`` does not hold it


# Where each comes from: shared memory and gloo from `bench comm` and benchmarks/all_reduce.py with 2 ranks on two cores of a
# server CPU, rounded (gloo through the loopback interface: a real network has its own bandwidth); encoding and decoding
# there from benchmarks/codec.py, one core, and adding from benchmarks/limited_link.py; the two for CUDA are published figures of PCIe boxes (25 GB/s each way, 10 us for a library call, 4 us for a kernel's barrier), not measured here.
LINK_COSTS: Mapping[tuple[str, str], LinkCost] = {
    ("shared-memory", "cpu"): LinkCost(
        call=6,
        coded_call=80,
        round=4,
        message_round=35,
        mib=200,
        native_round=150,
        native_mib=700,
        encode_melem=260,
        decode_melem=170,
    ),
    ("process-group", "cpu"): LinkCost(
        call=20,
        coded_call=40,
        round=110,
        message_round=110,
        mib=740,
        native_round=150,
        native_mib=740,
        encode_melem=260,
        decode_melem=170,
        sum_melem=320,
    ),
    ("process-group", "cuda"): LinkCost(
        call=5,
        coded_call=20,
        round=15,
        message_round=15,
        mib=45,
        native_round=6,
        native_mib=42,
        encode_melem=4,
        decode_melem=3,
    ),
    ("peer-memory", "cuda"): LinkCost(
        call=3,
        coded_call=2,
        round=4,
        message_round=15,
        mib=42,
        native_round=6,
        native_mib=42,
        encode_melem=2,
        decode_melem=1.5,
    ),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """``measured``: read off what was measured on this host, not computed from seeds."""

    us: float
    measured: bool


Points = Mapping[str, Sequence[tuple[int, float]]]  # algorithm -> (message bytes, microseconds), sizes rising


class CostModel:
    """Times of algorithms in one setting. ``points`` are measurements, none for an algorithm that was not measured.

    ``wire``: what each node sends over, at most at that rate, whoever of its ranks it is; each rank is a node of its own
    where there are no others.
    """

    def __init__(self, setting: Setting, points: Points | None = None, wire: Link | None = None) -> None:
        key = (setting.transport, setting.device)
        if key not in LINK_COSTS:
            raise ValueError(f"no cost is known of {setting.device} ranks over {setting.transport}")
        self.setting = setting
        self._link, self._wire = LINK_COSTS[key], wire
        self._points = {name: list(row) for name, row in (points or {}).items() if row}

    def predict(self, name: str, num_bytes: int) -> Prediction:
        """How long ``name`` takes for a message of ``num_bytes``.

        Between two measured sizes: a straight line in logarithms. Beyond them: the seeds' shape from the nearest one.
        """
        row = self._points.get(name)
        if row is None:
            return Prediction(self.seeded_us(name, num_bytes), measured=False)
        place = bisect_left(row, (num_bytes, 0.0))
        if 0 < place < len(row):
            (low, low_us), (high, high_us) = row[place - 1], row[place]
            share = math.log(num_bytes / low) / math.log(high / low)
            return Prediction(low_us ** (1 - share) * high_us**share, measured=True)
        edge, edge_us = row[min(place, len(row) - 1)]
        if edge == num_bytes:
            return Prediction(edge_us, measured=True)
        return Prediction(edge_us * self.seeded_us(name, num_bytes) / self.seeded_us(name, edge), measured=True)

    def wire_bytes(self, name: str, num_bytes: int) -> int:
        """What rank 0 sends; for ring, native and hierarchical to within a slice's rounding."""
        parsed, ranks, elem_bytes = parse_all_reduce(name), self.setting.world_size, self.setting.elem_bytes
        if name == "two-shot":
            return two_shot_bytes(0, ranks, num_bytes // elem_bytes, elem_bytes)
        if name.startswith("flash"):
            return flash_bytes(0, ranks, num_bytes // elem_bytes, elem_bytes, *parsed.codecs)
        work = _work(parsed, self.setting, num_bytes)
        return round(work.sent_bytes + work.node_bytes)

    def seeded_us(self, name: str, num_bytes: int) -> float:
        """What the seeds alone say, whatever was measured."""
        work = _work(parse_all_reduce(name), self.setting, num_bytes)
        link, between = self._costs(name)
        round_us, mib_us = (link.native_round, link.native_mib) if name == "native" else (link.round, link.mib)
        if name == "ring" or name.startswith("hierarchical"):
            round_us = link.message_round
        moving_us = work.rounds * round_us + work.sent_bytes / _MIB * mib_us
        moving_us += work.node_rounds * between.message_round + work.node_bytes / _MIB * between.mib
        adding_us = (work.summed_elems * link.sum_melem + work.node_summed_elems * between.sum_melem) / _MIB
        coding_us = (work.encoded_elems * link.encode_melem + work.decoded_elems * link.decode_melem) / _MIB
        return link.call + moving_us + adding_us + (link.coded_call + coding_us if work.encoded_elems else 0)

    def _costs(self, name: str) -> tuple[LinkCost, LinkCost]:
        """Of the messages of ``name`` between all ranks, or inside a node where it knows nodes; and between nodes."""
        setting, link = self.setting, self._link
        between = LINK_COSTS["process-group", setting.device]
        if self._wire is None:
            return link, between
        local = setting.world_size // setting.num_nodes if setting.num_nodes > 1 else 1
        if name.startswith("hierarchical") and setting.num_nodes > 1:
            return LINK_COSTS["shared-memory", setting.device], _behind(between, self._wire, local)
        # Of a ring, one rank of each node sends to another node; of all others each does, to all ranks there.
        others, remote = setting.world_size - 1, setting.world_size - local
        shared_by = 1 if name in ("ring", "native") else local * remote / others
        return _behind(link, self._wire, shared_by), between


def _behind(cost: LinkCost, wire: Link, shared_by: float) -> LinkCost:
    """``cost`` behind ``wire``, over which go the bytes of ``shared_by`` ranks, at the rate that is the lower."""
    wire_mib = shared_by * _MIB / wire.bytes_per_s * 1e6 if wire.bytes_per_s else 0.0
    latency_us = wire.latency_s * 1e6
    return replace(
        cost,
        round=cost.message_round + latency_us,  # no kernel reaches over a wire
        message_round=cost.message_round + latency_us,
        mib=max(cost.mib, wire_mib),
        native_round=cost.native_round + latency_us,
        native_mib=max(cost.native_mib, wire_mib),
        sum_melem=LINK_COSTS["process-group", "cpu"].sum_melem,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    rounds: int
    sent_bytes: float
    summed_elems: float = 0  # that are added as they are
    encoded_elems: float = 0  # each counted as often as its codec is slower than the fastest
    decoded_elems: float = 0
    node_rounds: int = 0  # between nodes, over another transport
    node_bytes: float = 0
    node_summed_elems: float = 0


def _work(name: AllReduceName, setting: Setting, num_bytes: int) -> _Work:
    """What one rank does for a message of ``num_bytes``; the bytes are those of the algorithms' own docstrings."""
    ranks = setting.world_size
    others, elems = (ranks - 1) / ranks, num_bytes / setting.elem_bytes
    if name.name == "one-shot":
        return _Work(1, (ranks - 1) * num_bytes, ranks * elems)
    if name.name == "two-shot":
        return _Work(2, 2 * others * num_bytes, elems)
    if name.name in ("ring", "native"):
        return _Work(2 * (ranks - 1), 2 * others * num_bytes, elems)
    if name.name.startswith("flash"):
        reduce, gather = name.codecs
        sent = others * elems * (_elem_bytes(reduce, setting) + _elem_bytes(gather, setting))
        # Own slices out, everybody's slices in; then the own sum out, everybody's sums in.
        reduced, gathered = elems * _effort(reduce), elems * _effort(gather)
        return _Work(2, sent, elems if reduce.exact else 0, reduced + gathered / ranks, reduced + gathered)
    (codec,) = name.codecs
    nodes, local = setting.num_nodes, ranks // setting.num_nodes
    inside = 2 * (local - 1) / local * num_bytes
    between = 2 * (nodes - 1) / nodes * elems / local * _elem_bytes(codec, setting)
    coded = elems / local * _effort(codec)
    return _Work(
        2 if local > 1 else 0,
        inside,
        elems if local > 1 else 0,
        encoded_elems=coded * (1 + 1 / nodes),
        decoded_elems=2 * coded,
        node_rounds=2 if nodes > 1 else 0,
        node_bytes=between,
        node_summed_elems=elems / local if codec.exact and nodes > 1 else 0,
    )


def _elem_bytes(codec: Codec, setting: Setting) -> float:
    return codec.wire_bytes(codec.group_elems, setting.elem_bytes) / codec.group_elems


def _effort(codec: Codec) -> float:
    """How many times as long ``codec`` takes as int8, by benchmarks/codec.py; 0: it is exact, and takes nothing."""
    fmt = codec.format
    if fmt is None:
        return 0.0
    if fmt.spikes:
        return 3.0
    if fmt.hadamard:
        return 2.3
    return (1.9 if len(fmt.plane_bits) > 1 else 1.0) * _GROUP_EFFORT[fmt.group_elems]


_GROUP_EFFORT = {128: 1.0, 64: 1.2, 32: 1.7}


def size_grid(smallest: int, largest: int) -> list[int]:
    """Message sizes from ``smallest`` to at least ``largest``, four to every doubling."""
    count = max(0, math.ceil(4 * math.log2(largest / smallest)))
    grid = [round(smallest * 2 ** (step / 4)) for step in range(count + 1)]
    assert all(a < b for a, b in pairwise(grid)), "steps of a byte and more"
    return grid
