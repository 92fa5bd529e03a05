"""Hierarchical AllReduce: sums inside each node, then between nodes, then shares inside. For slow links between nodes.

Of N ranks on K nodes of L ranks each, every rank sends 1/L of the tensor over the slow link: 2 (K-1)/K * M/L bytes
against two-shot's nearly 2 M. Flash Communication V2 (arXiv 2508.03760) does so between NUMA domains, qgZ (ZeRO++,
2306.10209) between machines.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tightwire.comm.all_reduce.base import BaseAllReduce
from tightwire.comm.all_reduce.entry import NODE_ORDER, Setting, Work, coded_elem_bytes, coding_effort
from tightwire.comm.all_reduce.names import NAMES
from tightwire.comm.codec import error_bounds
from tightwire.comm.codec.codec import NONE, Carried, Codec, prepare_codecs, slices_for, sum_encoded, sum_in_rank_order
from tightwire.comm.group.group import Group
from tightwire.comm.group.legs import exchange_encoded, gather_decoded, sum_in_two_legs, two_leg_bytes
from tightwire.comm.group.nodes import run_leg


class HierarchicalAllReduce(BaseAllReduce):
    """Two-shot whose sums of slices go through a second two-shot, between nodes, with its own codec.

    Four rounds: exchange slices inside the node; exchange and gather between nodes; gather inside. A group on one node
    skips the two middle rounds, which makes it two-shot.

    Cost: with s this rank's slice of about M/L inside and c its size encoded by ``codec``: M - s + (L-1) s inside,
    about 2 (K-1)/K * c between nodes. Exactness: without a codec a node's sum is rounded to the dtype once; with one it
    is encoded from float32, once in each leg. Ranks are added in order within a node, and nodes in order.
    """

    def __init__(self, group: Group, codec: Codec = NONE, name: str = "hierarchical") -> None:
        super().__init__(group)
        self.name = name
        self._inside = group if group.nodes is None else group.nodes.inside
        self._across = None if group.nodes is None else group.nodes.across
        self._codec = NONE if group.nodes is None else codec
        self.lossless = self._codec.exact
        prepare_codecs(group.device, self._codec, self._codec)

    def _reduce(self, x_N: Tensor, carried: Carried) -> Tensor:
        group, inside, dtype = self._group, self._inside, x_N.dtype
        lengths = self._slices_inside(x_N.numel())
        own = lengths[inside.rank]
        received = run_leg(group, inside, exchange_encoded, inside, x_N, lengths, NONE)
        if self._codec.exact:
            sum_N = sum_in_rank_order([buf.view(dtype) for buf in received])
        else:
            sum_N = sum_encoded(received, own, NONE, dtype)
        if self._across is not None and own:
            across, codecs = self._across, (self._codec, self._codec)
            slices = self._slices_across(own)
            sum_N = run_leg(group, across, sum_in_two_legs, across, sum_N, slices, codecs, dtype)
        sum_N = sum_N.to(dtype)  # an empty slice may still be float32
        return run_leg(group, inside, gather_decoded, inside, NONE.encode(sum_N), lengths, NONE, dtype)

    def _slices_inside(self, num_elems: int) -> list[int]:
        # Codec groups between nodes are aligned to the start of the tensor, for any L.
        return slices_for(num_elems, self._inside.world_size, self._codec)

    def _slices_across(self, num_elems: int) -> list[int]:
        assert self._across is not None
        return slices_for(num_elems, self._across.world_size, self._codec)

    def wire_bytes(self, num_elems: int, elem_bytes: int) -> int:
        return self._bytes(num_elems, elem_bytes, self._codec)

    def _exact_bytes(self, x: Tensor) -> int | None:
        return None if self.lossless else self._bytes(x.numel(), x.element_size(), NONE)

    def _bytes(self, num_elems: int, elem_bytes: int, codec: Codec) -> int:
        lengths, inside, across = self._slices_inside(num_elems), self._inside, self._across
        sent = two_leg_bytes(inside.rank, lengths, (NONE, NONE), elem_bytes)
        if across is not None:
            slices = self._slices_across(lengths[inside.rank])
            sent += two_leg_bytes(across.rank, slices, (codec, codec), elem_bytes)
        return sent

    def max_error(self, inputs: Sequence[Tensor]) -> Tensor:
        """Without a codec: the nodes' sums with one rounding each, then their sum. With one: flash's bound, over nodes."""
        if self._across is None:
            return error_bounds.rank_order_bound(inputs)
        size = self._inside.world_size
        by_node = [[x.reshape(-1) for x in inputs[i : i + size]] for i in range(0, len(inputs), size)]
        flat = [x_N for parts in by_node for x_N in parts]
        if self._codec.exact:
            bound_N = error_bounds.rounded_parts_bound(by_node)
        else:
            sums = [sum_in_rank_order([x_N.float() for x_N in parts]) for parts in by_node]
            sum_N, error_N = error_bounds.quantized_sum_bound(sums, self._codec)
            for parts in by_node:
                error_N = error_N + error_bounds.adding_bound(parts)
            bound_N = error_bounds.quantized_total_bound(flat, sum_N, error_N, self._codec)
        return bound_N.view(inputs[0].shape)


def _work(setting: Setting, num_bytes: int, codec: Codec) -> Work:
    ranks, nodes = setting.world_size, setting.num_nodes
    local, elems = ranks // nodes, num_bytes / setting.elem_bytes
    inside = 2 * (local - 1) / local * num_bytes
    between = 2 * (nodes - 1) / nodes * elems / local * coded_elem_bytes(codec, setting)
    coded = elems / local * coding_effort(codec)
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


ENTRY = replace(
    NAMES["hierarchical"],
    make=HierarchicalAllReduce,
    work=_work,
    lossy_names=lambda suffix: [f"hierarchical:int8{suffix}", f"hierarchical:int4{suffix}"],
    order=NODE_ORDER,
    needs_nodes=True,
    rounds="message",
    preference=6,
)
