"""What an AllReduce costs: predicted from rounds, bytes and quantization, or measured on this host where it was.

    us = call + rounds * round + sent bytes * byte (+ coded call + encoded elements * encode + decoded elements * decode)

The constants of a ``LinkCost`` are seeds: good enough to tell apart algorithms that differ much. ``tightwire tune`` replaces
the prediction by what it measured. Source of the model: Thakur, Rabenseifner and Gropp, Optimization of Collective
Communication Operations in MPICH, 2005.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from tightwire.comm.all_reduce.flash import flash_bytes
from tightwire.comm.all_reduce.two_shot import two_shot_bytes
from tightwire.comm.codec import Codec
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
    encode_melem: float
    decode_melem: float


# Where each comes from: shared memory and gloo from `bench comm` and benchmarks/all_reduce.py with 2 ranks on two cores of a
# server CPU, rounded (gloo through the loopback interface: a real network has its own bandwidth); the two for CUDA are
# published figures of PCIe boxes (25 GB/s each way, 10 us for a library call, 4 us for a kernel's barrier), not measured here.
LINK_COSTS: Mapping[tuple[str, str], LinkCost] = {
    ("shared-memory", "cpu"): LinkCost(
        call=6,
        coded_call=80,
        round=4,
        message_round=35,
        mib=200,
        native_round=150,
        native_mib=700,
        encode_melem=600,
        decode_melem=250,
    ),
    ("process-group", "cpu"): LinkCost(
        call=20,
        coded_call=40,
        round=110,
        message_round=110,
        mib=900,
        native_round=150,
        native_mib=900,
        encode_melem=600,
        decode_melem=250,
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
    """Times of algorithms in one setting. ``points`` are measurements, none for an algorithm that was not measured."""

    def __init__(self, setting: Setting, points: Points | None = None) -> None:
        key = (setting.transport, setting.device)
        if key not in LINK_COSTS:
            raise ValueError(f"no cost is known of {setting.device} ranks over {setting.transport}")
        self.setting = setting
        self._link = LINK_COSTS[key]
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
        link, work = self._link, _work(parse_all_reduce(name), self.setting, num_bytes)
        between = LINK_COSTS["process-group", self.setting.device]
        round_us, mib_us = (link.native_round, link.native_mib) if name == "native" else (link.round, link.mib)
        if name == "ring" or name.startswith("hierarchical"):
            round_us = link.message_round
        moving_us = work.rounds * round_us + work.sent_bytes / _MIB * mib_us
        moving_us += work.node_rounds * between.message_round + work.node_bytes / _MIB * between.mib
        coding_us = (work.encoded_elems * link.encode_melem + work.decoded_elems * link.decode_melem) / _MIB
        return link.call + moving_us + (link.coded_call + coding_us if work.encoded_elems else 0)


@dataclass(frozen=True, slots=True)
class _Work:
    rounds: int
    sent_bytes: float
    encoded_elems: float = 0
    decoded_elems: float = 0
    node_rounds: int = 0  # between nodes, over another transport
    node_bytes: float = 0


def _work(name: AllReduceName, setting: Setting, num_bytes: int) -> _Work:
    """What one rank does for a message of ``num_bytes``; the bytes are those of the algorithms' own docstrings."""
    ranks = setting.world_size
    others = (ranks - 1) / ranks
    if name.name == "one-shot":
        return _Work(1, (ranks - 1) * num_bytes)
    if name.name == "two-shot":
        return _Work(2, 2 * others * num_bytes)
    if name.name in ("ring", "native"):
        return _Work(2 * (ranks - 1), 2 * others * num_bytes)
    elems = num_bytes / setting.elem_bytes
    if name.name.startswith("flash"):
        reduce, gather = name.codecs
        sent = others * elems * (_elem_bytes(reduce, setting) + _elem_bytes(gather, setting))
        # Own slices out, everybody's slices in; then the own sum out, everybody's sums in.
        reduced, gathered = 0 if reduce.exact else elems, 0 if gather.exact else elems
        return _Work(2, sent, reduced + gathered / ranks, reduced + gathered)
    (codec,) = name.codecs
    nodes, local = setting.num_nodes, ranks // setting.num_nodes
    inside = 2 * (local - 1) / local * num_bytes
    between = 2 * (nodes - 1) / nodes * elems / local * _elem_bytes(codec, setting)
    coded = 0 if codec.exact else elems / local
    return _Work(
        2 if local > 1 else 0,
        inside,
        encoded_elems=coded * (1 + 1 / nodes),
        decoded_elems=2 * coded,
        node_rounds=2 if nodes > 1 else 0,
        node_bytes=between,
    )


def _elem_bytes(codec: Codec, setting: Setting) -> float:
    return codec.wire_bytes(codec.group_elems, setting.elem_bytes) / codec.group_elems


def size_grid(smallest: int, largest: int) -> list[int]:
    """Message sizes from ``smallest`` to at least ``largest``, four to every doubling."""
    count = max(0, math.ceil(4 * math.log2(largest / smallest)))
    grid = [round(smallest * 2 ** (step / 4)) for step in range(count + 1)]
    assert all(a < b for a, b in pairwise(grid)), "steps of a byte and more"
    return grid
