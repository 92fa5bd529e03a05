"""What one rank has to do in an AllReduce: rounds of messages, bytes, sums, encoding and decoding."""

from dataclasses import dataclass

from tightwire.comm.all_reduce.registry import AllReduceName
from tightwire.comm.codec.codec import Codec
from tightwire.comm.policy.setting import Setting


@dataclass(frozen=True, slots=True)
class Work:
    rounds: int
    sent_bytes: float
    summed_elems: float = 0  # that are added as they are
    encoded_elems: float = 0  # each counted as often as its codec is slower than the fastest
    decoded_elems: float = 0
    node_rounds: int = 0  # between nodes, over another transport
    node_bytes: float = 0
    node_summed_elems: float = 0


def work_of(name: AllReduceName, setting: Setting, num_bytes: int) -> Work:
    """What one rank does for a message of ``num_bytes``; the bytes are those of the algorithms' own docstrings."""
    ranks = setting.world_size
    others, elems = (ranks - 1) / ranks, num_bytes / setting.elem_bytes
    if name.name == "one-shot":
        return Work(1, (ranks - 1) * num_bytes, ranks * elems)
    if name.name == "two-shot":
        return Work(2, 2 * others * num_bytes, elems)
    if name.name in ("ring", "native"):
        return Work(2 * (ranks - 1), 2 * others * num_bytes, elems)
    if name.name.startswith("flash"):
        reduce, gather = name.codecs
        sent = others * elems * (coded_elem_bytes(reduce, setting) + coded_elem_bytes(gather, setting))
        # Own slices out, everybody's slices in; then the own sum out, everybody's sums in.
        reduced, gathered = elems * _effort(reduce), elems * _effort(gather)
        return Work(2, sent, elems if reduce.exact else 0, reduced + gathered / ranks, reduced + gathered)
    (codec,) = name.codecs
    nodes, local = setting.num_nodes, ranks // setting.num_nodes
    inside = 2 * (local - 1) / local * num_bytes
    between = 2 * (nodes - 1) / nodes * elems / local * coded_elem_bytes(codec, setting)
    coded = elems / local * _effort(codec)
    return Work(
        2 if local > 1 else 0,
        inside,
        elems if local > 1 else 0,
        encoded_elems=coded * (1 + 1 / nodes),
        decoded_elems=2 * coded,
        node_rounds=2 if nodes > 1 else 0,
        node_bytes=between,
        node_summed_elems=elems / local if codec.exact and nodes > 1 else 0,
    )


def coded_elem_bytes(codec: Codec, setting: Setting) -> float:
    return codec.wire_bytes(codec.group_elems, setting.elem_bytes) / codec.group_elems


def _effort(codec: Codec) -> float:
    """How many times as long ``codec`` takes as int8, by `bench kernels`; 0: it is exact, and takes nothing."""
    fmt = codec.format
    if fmt is None:
        return 0.0
    if fmt.spikes:
        return 3.0
    if fmt.hadamard:
        return 2.3
    return (1.9 if len(fmt.plane_bits) > 1 else 1.0) * _GROUP_EFFORT[fmt.group_elems]


_GROUP_EFFORT = {128: 1.0, 64: 1.2, 32: 1.7}
