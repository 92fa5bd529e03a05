"""qgZ, the quantized gradients of ZeRO++ (arXiv 2306.10209, section 3.3): reduce-scatter inside each node, then between nodes.

Each leg has a codec of its own. Without codecs it is a hierarchical reduce-scatter. On one node use ``reduce_scatter``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.codec.codec import (
    NONE,
    Codec,
    check_summable,
    encode_slices,
    slices_for,
    sum_and_encode,
    sum_encoded,
)
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg


def hierarchical_reduce_scatter(
    group: Group, x: Tensor, inside_codec: Codec = NONE, across_codec: Codec = NONE, dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's slice, (``slices_for(...)[rank]``,), of the sum of the ranks' flattened tensors.

    Inside each node first: of N ranks on K nodes of L, (K-1)/K of a tensor leaves every node instead of L (K-1)/K. Each
    leg quantizes each number once, with its own codec.

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
    lengths = slices_for(x.numel(), group.world_size, inside_codec, across_codec)
    exact = inside_codec.exact and across_codec.exact
    exact_bytes = None if exact else (x.numel() - lengths[group.rank]) * x.element_size()
    algorithm = f"hierarchical:{inside_codec.name},{across_codec.name}"
    with group.recorded("reduce_scatter", algorithm, x.nbytes, exact_bytes):
        sums = run_leg(
            group, inside, _encoded_sums, inside, x.contiguous().view(-1), lengths, inside_codec, across_codec
        )
        received = run_leg(group, across, across.transport.exchange, sums)
        with ledger.coding_if(not across_codec.exact):
            return sum_encoded(received, lengths[group.rank], across_codec, x.dtype).to(dtype)


def hierarchical_bytes(
    rank: int, num_nodes: int, per_node: int, num_elems: int, elem_bytes: int, inside_codec: Codec, across_codec: Codec
) -> tuple[int, int]:
    """The bytes that ``rank`` sends (inside, between) nodes: about (L-1)/L a(n), (K-1)/K b(n/L) for codecs a, b."""
    lengths = slices_for(num_elems, num_nodes * per_node, inside_codec, across_codec)
    by_place = [lengths[place::per_node] for place in range(per_node)]
    node, place = divmod(rank, per_node)
    own = by_place.pop(place)
    inside = sum(inside_codec.wire_bytes(sum(slices), elem_bytes) for slices in by_place)
    del own[node]
    return inside, sum(across_codec.wire_bytes(length, elem_bytes) for length in own)


def _encoded_sums(
    inside: Group, x_N: Tensor, lengths: list[int], codec: Codec, across_codec: Codec
) -> Sequence[Tensor]:
    """The node's sums of the slices of this place on every node, each encoded for its owner, in one pass if both codecs quantize."""
    codec = NONE if inside.world_size == 1 else codec  # nothing is sent inside, so nothing is quantized
    coding = inside.ledger.coding_if(not (codec.exact and across_codec.exact))
    per_node, own = inside.world_size, lengths[inside.rank :: inside.world_size]
    with coding:  # each slice where it is, so that nothing is copied into the order of places before it is small
        encoded = [encode_slices(part, [part.numel()], codec)[0] for part in x_N.split(lengths)]
        encoded = [torch.cat(encoded[place::per_node]) for place in range(per_node)]
    received = inside.transport.exchange(encoded)
    sizes = [codec.wire_bytes(length, x_N.element_size()) for length in own]
    with coding:
        slices = zip(own, *(buf.split(sizes) for buf in received), strict=True)
        return [sum_and_encode(bufs, length, codec, across_codec, x_N.dtype) for length, *bufs in slices]
