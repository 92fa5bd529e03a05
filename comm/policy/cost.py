"""Cost of an AllReduce: measured on this host, or predicted from rounds, bytes and quantization.

    us = call + rounds * round + sent bytes * byte + summed elements * sum
         (+ coded call + encoded elements * encode + decoded elements * decode)

The constants of a ``LinkCost`` are seeds: accurate enough to separate algorithms that differ much. Behind an emulated
link (``serve --link``), bytes between nodes cost the link's rate, rounds add its latency, and computing costs what
``tune`` measured without messages. Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
Operations in MPICH, 2005.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tightwire.comm.all_reduce.entry import Setting, Work
from tightwire.comm.all_reduce.make import parse_all_reduce
from tightwire.comm.link.link import Link
from tightwire.comm.transport import wire_codec

_MIB = 1 << 20


class LinkCost(NamedTuple):
    """Seed costs of one transport, in microseconds; ``*_mib`` per MiB sent, ``*_melem`` per 2^20 elements."""

    call: float
    coded_call: float  # added for an algorithm that encodes
    round: float  # a round of one-shot, two-shot and flash, which are one kernel where memory is shared
    message_round: float  # a round of algorithms that always send messages
    mib: float
    native_round: float
    native_mib: float
    encode_melem: float  # int8 in groups of 128; ``coding_effort`` scales it for other codecs
    decode_melem: float
    sum_melem: float  # adding exactly, where ``mib`` does not include it


# Sources. Shared memory, sockets and gloo: `bench comm` with 2 ranks on two cores of a server CPU, rounded (over the loopback
# interface; a real network has its own bandwidth). Encoding and decoding: `bench kernels` on one core. Adding: `bench comm
# --link`. CUDA: published figures of PCIe machines (25 GB/s each way, 10 us for a library call, 4 us for a kernel's barrier),
# not measured here. Columns in the order of the fields: call, coded call, round, message round, MiB; native round, MiB;
# encode, decode, sum.
LINK_COSTS: Mapping[tuple[str, str], LinkCost] = {
    ("shared-memory", "cpu"): LinkCost(6, 80, 4, 35, 200, 150, 700, 260, 170, 0),
    ("sockets", "cpu"): LinkCost(12, 40, 18, 18, 270, 150, 740, 260, 170, 320),
    ("process-group", "cpu"): LinkCost(20, 40, 110, 110, 740, 150, 740, 260, 170, 320),
    ("process-group", "cuda"): LinkCost(5, 20, 15, 15, 45, 6, 42, 4, 3, 0),
    ("peer-memory", "cuda"): LinkCost(3, 2, 4, 15, 42, 6, 42, 2, 1.5, 0),
}


class Prediction(NamedTuple):
    """The time of one AllReduce, and how it is known."""

    us: float
    measured: bool  # interpolated from measurements on this host, not computed from seeds


Points = Mapping[str, Sequence[tuple[int, float]]]  # algorithm -> (message bytes, microseconds), sizes rising


class CostModel:
    """Times of algorithms in one setting: read from measurements, or predicted for algorithms without any.

    ``points`` are measured times. ``wire`` is the link between nodes, shared by all ranks of a node; with a single node,
    each rank counts as its own node. ``computing`` has measured times without messages, used with any ``wire``.
    """

    def __init__(
        self, setting: Setting, points: Points | None = None, wire: Link | None = None, computing: Points | None = None
    ) -> None:
        key = (setting.transport, setting.device)
        if key not in LINK_COSTS:
            raise ValueError(f"no cost is known of {setting.device} ranks over {setting.transport}")
        self.setting = setting
        self._link, self._wire = LINK_COSTS[key], wire
        self._points = {name: list(row) for name, row in (points or {}).items() if row}
        # Only behind a link: with shared memory alone, kernels compute and move in one.
        self._computing = {name: list(row) for name, row in (computing or {}).items() if row and wire is not None}

    def predict(self, name: str, num_bytes: int) -> Prediction:
        """The time of ``name`` for a message of ``num_bytes``; beyond the measured sizes, scaled by the model."""
        row = self._points.get(name)
        if row is None:
            return Prediction(self.modelled_us(name, num_bytes), measured=False)
        return Prediction(_read_off(row, num_bytes, lambda size: self.modelled_us(name, size)), measured=True)

    def wire_bytes(self, name: str, num_bytes: int) -> int:
        """The bytes that rank 0 sends; for ring, native and hierarchical up to a slice's rounding."""
        parsed = parse_all_reduce(name)
        if parsed.wire_bytes is not None:
            return parsed.wire_bytes(self.setting, num_bytes, *parsed.codecs)
        work = self._work(name, num_bytes)
        return round(work.sent_bytes + work.node_bytes)

    def modelled_us(self, name: str, num_bytes: int) -> float:
        """The formula with the seeds' constants; computing as measured, if it was."""
        return sum(self.parts_us(name, num_bytes))

    def parts_us(self, name: str, num_bytes: int) -> tuple[float, float]:
        """The two parts of ``modelled_us``: computing, and moving."""
        work = self._work(name, num_bytes)
        link, between = self._costs(name)
        kind = parse_all_reduce(name).rounds
        round_us = {"kernel": link.round, "message": link.message_round, "library": link.native_round}[kind]
        sent_us = work.sent_bytes / _MIB * (link.native_mib if kind == "library" else link.mib)
        across_us, coding_us = work.node_bytes / _MIB * between.mib, 0.0
        if self._is_coded(name, work):
            coding_us = 2 * (work.node_bytes or work.sent_bytes) / _MIB * wire_codec.CODING_US_A_MIB
            if work.node_bytes:
                across_us *= wire_codec.USUAL_SHARE
            else:
                sent_us *= wire_codec.USUAL_SHARE
        moving_us = work.rounds * round_us + sent_us + work.node_rounds * between.message_round + across_us
        row = self._computing.get(name)
        if row is None:
            return coding_us + _computing_us(work, link, between), moving_us
        computing_us = _read_off(row, num_bytes, lambda size: _computing_us(self._work(name, size), link, between))
        return coding_us + computing_us, moving_us

    def _is_coded(self, name: str, work: Work) -> bool:
        entry, setting = parse_all_reduce(name), self.setting
        if not setting.coded or not entry.lossless or entry.rounds == "library":
            return False
        if work.node_bytes:
            return work.node_bytes >= work.node_rounds * (setting.num_nodes - 1) * wire_codec.LEAST_BYTES
        num_messages = work.rounds * (1 if entry.neighbours_only else setting.world_size - 1)
        return work.sent_bytes >= num_messages * wire_codec.LEAST_BYTES

    def _work(self, name: str, num_bytes: int) -> Work:
        parsed = parse_all_reduce(name)
        if parsed.work is None:
            raise ValueError(f"{name} has no cost of its own; name an algorithm")
        return parsed.work(self.setting, num_bytes, *parsed.codecs)

    def _costs(self, name: str) -> tuple[LinkCost, LinkCost]:
        """Costs of the messages of ``name``: between all ranks (inside a node if it uses nodes), and between nodes."""
        setting, link = self.setting, self._link
        messages = "process-group" if setting.device == "cuda" or setting.transport == "process-group" else "sockets"
        between = LINK_COSTS[messages, setting.device]
        if self._wire is None:
            return link, between
        local = setting.world_size // setting.num_nodes if setting.num_nodes > 1 else 1
        entry = parse_all_reduce(name)
        if entry.needs_nodes and setting.num_nodes > 1:
            return LINK_COSTS["shared-memory", setting.device], _behind(between, self._wire, local)
        # In a ring, one rank of each node sends to another node. In all others each rank does, to all ranks there.
        others, remote = setting.world_size - 1, setting.world_size - local
        shared_by = 1 if entry.neighbours_only else local * remote / others
        return _behind(link, self._wire, shared_by), between


def _behind(cost: LinkCost, wire: Link, shared_by: float) -> LinkCost:
    """``cost`` behind ``wire``, which carries the bytes of ``shared_by`` ranks; the lower of both rates applies."""
    wire_mib = shared_by * _MIB / wire.bytes_per_s * 1e6 if wire.bytes_per_s else 0.0
    latency_us = wire.latency_s * 1e6
    return cost._replace(
        round=cost.message_round + latency_us,  # kernels cannot span a network link
        message_round=cost.message_round + latency_us,
        mib=max(cost.mib, wire_mib),
        native_round=cost.native_round + latency_us,
        native_mib=max(cost.native_mib, wire_mib),
        sum_melem=LINK_COSTS["process-group", "cpu"].sum_melem,
    )


def _computing_us(work: Work, link: LinkCost, between: LinkCost) -> float:
    """Time to call, add, encode and decode, by the seeds."""
    adding_us = (work.summed_elems * link.sum_melem + work.node_summed_elems * between.sum_melem) / _MIB
    coding_us = (work.encoded_elems * link.encode_melem + work.decoded_elems * link.decode_melem) / _MIB
    return link.call + adding_us + (link.coded_call + coding_us if work.encoded_elems else 0)


def _read_off(row: Sequence[tuple[int, float]], num_bytes: int, shape_us: Callable[[int], float]) -> float:
    """Interpolate the microseconds at ``num_bytes``, linearly in logarithms, between two measured sizes of ``row``.

    Beyond the measured sizes, scale the time of the nearest one by ``shape_us``.
    """
    place = bisect_left(row, (num_bytes, 0.0))
    if 0 < place < len(row):
        (low, low_us), (high, high_us) = row[place - 1], row[place]
        share = math.log(num_bytes / low) / math.log(high / low)
        return low_us ** (1 - share) * high_us**share
    edge, edge_us = row[min(place, len(row) - 1)]
    return edge_us if edge == num_bytes else edge_us * shape_us(num_bytes) / shape_us(edge)


def size_grid(smallest: int, largest: int) -> list[int]:
    """Message sizes from ``smallest`` to at least ``largest``, four per doubling."""
    count = max(0, math.ceil(4 * math.log2(largest / smallest)))
    grid = [round(smallest * 2 ** (step / 4)) for step in range(count + 1)]
    assert all(a < b for a, b in pairwise(grid)), "steps of a byte and more"
    return grid
