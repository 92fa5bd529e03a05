"""Reduce-scatter and all-gather of shards over nodes, so that the link between nodes carries one tensor per node.

Reduce-scatter adds inside each node first. Source: qgZ of ZeRO++ (arXiv 2306.10209, section 3.3): of N ranks on K nodes of L, a plain all-to-all sends L (K-1)/K of
a tensor out of every node, this one (K-1)/K. Each number is quantized twice, once in each leg, each leg with its own
codec.

Shards of weights are encoded once and gathered often into permanent memory. ``gather_shards`` is one round. Over nodes,
``gather_across`` gets the shards of this rank's place on every node and ``gather_inside`` shares them inside the node: 1/L of
the bytes leave a node. Nodes that keep the first leg's result gather again without the link between nodes (hpZ). Slices
are equal: (N,) is W shards of N / W. Encoded bytes go to ``room``, (W c(N/W),) uint8 or more; in two legs exact ones do too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec
from tightwire.comm.codec.slices import check_summable, encode_slices, slice_lengths, sum_encoded
from tightwire.comm.collectives.collectives import NONE
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg
from tightwire.comm.transport.legs import exchange_encoded


def hierarchical_reduce_scatter(
    group: Group, x: Tensor, inside_codec: Codec = NONE, across_codec: Codec = NONE, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's slice, (``hierarchical_slices(...)[rank]``,), of the sum of the ranks' flattened tensors.

    1. Inside its node a rank sends each other rank the slices of all ranks with that rank's place on their node.
    2. Each rank adds what it received, in float32 in rank order. A ``none`` leg between nodes sends these sums in the
       dtype of ``x``, so rounded once more; a codec encodes the float32 sums.
    3. Between nodes it sends each part to its owner, which adds them in the order of the nodes and rounds once to
       ``dtype`` (default: that of ``x``).

    Cost: ``hierarchical_bytes``, two rounds. Raises TypeError for other dtypes, ValueError for a group without nodes.
    """
    check_summable(x)
    if group.nodes is None:
        raise ValueError(
            "this group was opened without nodes: open it with comm.group.nodes.join_nodes, or use collectives.reduce_scatter"
        )
    dtype = dtype or x.dtype
    if x.numel() == 0:
        return x.new_empty(0, dtype=dtype)
    inside, across, ledger = group.nodes.inside, group.nodes.across, group.ledger
    lengths = hierarchical_slices(x.numel(), group.world_size, inside_codec, across_codec)
    own = _lengths_by_place(inside.world_size, lengths)[inside.rank]
    exact = inside_codec.exact and across_codec.exact
    exact_bytes = None if exact else (x.numel() - lengths[group.rank]) * x.element_size()
    algorithm = f"hierarchical:{inside_codec.name},{across_codec.name}"
    with group.recorded("reduce_scatter", algorithm, x.nbytes, exact_bytes):
        sum_N = run_leg(group, inside, _sum_inside, inside, x.contiguous().view(-1), lengths, inside_codec)
        if across_codec.exact:
            sum_N = sum_N.to(x.dtype)
        received = run_leg(group, across, exchange_encoded, across.transport, sum_N, own, across_codec, ledger)
        with ledger.coding_if(not across_codec.exact):
            return sum_encoded(received, lengths[group.rank], across_codec, x.dtype).to(dtype)


def hierarchical_slices(num_elems: int, world_size: int, inside_codec: Codec, across_codec: Codec) -> list[int]:
    """Elements of each rank's slice, by rank: ceil(n / W) rounded up to whole groups of both codecs."""
    return slice_lengths(num_elems, world_size, max(inside_codec.group_elems, across_codec.group_elems))


def hierarchical_bytes(
    rank: int,
    num_nodes: int,
    ranks_per_node: int,
    num_elems: int,
    elem_bytes: int,
    inside_codec: Codec = NONE,
    across_codec: Codec = NONE,
) -> tuple[int, int]:
    """The bytes that ``rank`` sends (inside, between) nodes: about (L-1)/L a(n), (K-1)/K b(n/L) for codecs a, b."""
    lengths = hierarchical_slices(num_elems, num_nodes * ranks_per_node, inside_codec, across_codec)
    by_place = _lengths_by_place(ranks_per_node, lengths)
    node, place = divmod(rank, ranks_per_node)
    own = by_place.pop(place)
    inside = sum(inside_codec.wire_bytes(sum(slices), elem_bytes) for slices in by_place)
    del own[node]
    return inside, sum(across_codec.wire_bytes(length, elem_bytes) for length in own)


def _sum_inside(inside: Group, x_N: Tensor, lengths: list[int], codec: Codec) -> Tensor:
    """The node's float32 sum of the slices of this place on every node, concatenated."""
    if inside.world_size == 1:
        return x_N.float()  # nothing is sent, so nothing is quantized
    # All but one slice are whole groups and the short one is last, so joined slices have the same encoding as single ones.
    parts, per_node = x_N.split(lengths), inside.world_size
    coding = inside.ledger.coding_if(not codec.exact)
    encoded = []
    with coding:
        for place in range(per_node):
            joined_N = torch.cat(parts[place::per_node])
            encoded += encode_slices(joined_N, [joined_N.numel()], codec)
    received = inside.transport.exchange(encoded)
    with coding:
        return sum_encoded(received, sum(lengths[inside.rank :: per_node]), codec, x_N.dtype)


def _lengths_by_place(per_node: int, lengths: list[int]) -> list[list[int]]:
    """For each place on a node, the slices of the ranks with that place, by node."""
    return [lengths[place::per_node] for place in range(per_node)]


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
    with group.recorded(op, "direct" if codec.exact else codec.name, out_N.nbytes, exact_bytes):
        if group.world_size > 1:
            group.transport.gather_into(wires, received)
        else:
            received.copy_(wires)
        with group.ledger.coding_if(not codec.exact):
            for part, encoded in zip(slices, received.chunk(len(slices)) if slices else (), strict=True):
                codec.decode(encoded, part.numel(), part.dtype, part)


def _slices(out_N: Tensor, num_slices: int) -> list[Tensor]:
    return list(out_N.split(out_N.numel() // num_slices))
