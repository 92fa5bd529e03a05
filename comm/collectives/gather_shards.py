"""All-gather of weight shards that are encoded once and gathered often, into permanent memory: qwZ and hpZ of ZeRO++.

``gather_shards`` is one round (qwZ if the shards are quantized). Over nodes, ``gather_across`` gets the shards of this
rank's place on every node and ``gather_inside`` shares them inside the node: 1/L of the bytes leave a node. Nodes that keep
the first leg's result, a secondary copy of the weights, gather again without the link between nodes: hpZ (hierarchical
partitioning, arXiv 2306.10209).

Slices are equal: (N,) is W shards of N / W. Encoded bytes go to ``room``, (W c(N/W),) uint8 or more; in two legs exact ones
do too. In costs c is the codec's ``wire_bytes``; there are W ranks, K nodes and L ranks a node.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg


def gather_shards(group: Group, wire: Tensor, codec: Codec, out_N: Tensor, room: Tensor) -> None:
    """Decode the shards of all ranks of ``group`` into ``out_N``, in rank order. Cost: (W-1) c(N/W)."""
    if codec.exact:
        _share(group, wire, codec, out_N, out_N.view(torch.uint8), [], "all_gather")
    else:
        _share(group, wire, codec, out_N, room, _slices(out_N, group.world_size), "all_gather")


def gather_over_nodes(group: Group, wire: Tensor, codec: Codec, out_N: Tensor, room: Tensor) -> None:
    """Like ``gather_shards``, in two legs: ``gather_across`` and ``gather_inside``."""
    assert group.nodes is not None
    inside = group.nodes.inside
    brought = room[: group.world_size * wire.numel()].chunk(inside.world_size)[inside.rank]
    gather_across(group, wire, brought)
    gather_inside(group, brought, codec, out_N, room)


def gather_across(group: Group, wire: Tensor, out: Tensor) -> None:
    """Gather the encoded shards of this rank's place on each of K nodes into ``out``, by node. Cost: (K-1) c(N/W)."""
    assert group.nodes is not None
    across = group.nodes.across
    with across.recorded("gather_across", "direct", wire.nbytes):
        run_leg(group, across, across.transport.gather_into, wire, out)


def gather_inside(group: Group, wires: Tensor, codec: Codec, out_N: Tensor, room: Tensor) -> None:
    """Share and decode the results of ``gather_across``; ``wires`` may be a part of ``room``. Cost: (L-1) K c(N/W)."""
    assert group.nodes is not None
    inside = group.nodes.inside
    slices = _slices(out_N, group.world_size)
    # Rank r is at place r % L of node r // L: a place's message holds its shards on all nodes.
    by_place = [part for place in range(inside.world_size) for part in slices[place :: inside.world_size]]
    run_leg(group, inside, _share, inside, wires, codec, out_N, room, by_place, "gather_inside")


def gather_shards_bytes(world_size: int, wire_bytes: int) -> int:
    return (world_size - 1) * wire_bytes


def gather_across_bytes(num_nodes: int, wire_bytes: int) -> int:
    return (num_nodes - 1) * wire_bytes


def gather_inside_bytes(num_nodes: int, ranks_per_node: int, wire_bytes: int) -> int:
    return (ranks_per_node - 1) * num_nodes * wire_bytes


def _share(
    group: Group, wires: Tensor, codec: Codec, out_N: Tensor, room: Tensor, slices: Sequence[Tensor], op: str
) -> None:
    """Gather each rank's ``wires`` into ``room``, and decode it into ``slices`` of ``out_N``, equally many per rank."""
    received = room[: group.world_size * wires.numel()]
    exact_bytes = None if codec.exact else out_N.nbytes // group.world_size * (group.world_size - 1)
    with group.recorded(op, codec.label, out_N.nbytes, exact_bytes):
        if group.world_size > 1:
            group.transport.gather_into(wires, received)
        else:
            received.copy_(wires)
        with group.ledger.coding_if(not codec.exact):
            for part, encoded in zip(slices, received.chunk(len(slices)) if slices else (), strict=True):
                codec.decode(encoded, part.numel(), part.dtype, part)


def _slices(out_N: Tensor, num_slices: int) -> list[Tensor]:
    return list(out_N.split(out_N.numel() // num_slices))
