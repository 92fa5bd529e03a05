"""qgZ, the quantized gradients of ZeRO++ (arXiv 2306.10209, section 3.3): reduce-scatter inside each node, then between nodes.

Each leg has a codec of its own. Without codecs it is a hierarchical reduce-scatter. A group on one node uses
``reduce_scatter``.
"""

import torch
from torch import Tensor

from tightwire.comm.codec.codec import NONE, Codec, check_summable, encode_slices, slice_lengths, sum_encoded
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg
from tightwire.comm.transport.legs import exchange_encoded


def hierarchical_reduce_scatter(
    group: Group, x: Tensor, inside_codec: Codec = NONE, across_codec: Codec = NONE, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's slice, (``hierarchical_slices(...)[rank]``,), of the sum of the ranks' flattened tensors.

    Inside each node first: of N ranks on K nodes of L, (K-1)/K of a tensor leaves every node instead of L (K-1)/K. Each
    leg quantizes each number once, with its own codec. Source: qgZ of ZeRO++ (arXiv 2306.10209, section 3.3).

    1. Inside its node a rank sends each other rank the slices of all ranks with that rank's place on their node.
    2. Each rank adds what it received, in float32 in rank order. A ``none`` leg between nodes sends these sums in the
       dtype of ``x``, so rounded once more; a codec encodes the float32 sums.
    3. Between nodes it sends each part to its owner, which adds them in node order and rounds once to ``dtype``
       (default: that of ``x``).

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
