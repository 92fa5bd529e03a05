"""Collectives other than AllReduce: all-gather, reduce-scatter, broadcast, gather to one rank, and sparse all-gather.

Quantized training uses ``all_gather`` with a codec for weights (qwZ of ZeRO++, arXiv 2306.10209), ``reduce_scatter``
for gradients (qgZ; over nodes ``hierarchical_reduce_scatter``) and ``sparse_all_gather`` for sparse gradients (DGC, 1712.01887). The
group's ledger records every call; ``phase`` and ``site`` are for it.

As for an AllReduce, all ranks call with the same shapes and dtypes in the same order, and inputs are only read. With a
single rank nothing is sent or quantized. Call ``codec.prepare_codecs`` before the first collective.

Shards of weights are encoded once and gathered often into permanent memory. ``gather_shards`` is one round. Over nodes,
``gather_across`` gets the shards of this rank's place on every node and ``gather_inside`` shares them inside the node: 1/L of
the bytes leave a node. Nodes that keep the first leg's result gather again without the link between nodes (hpZ). Slices
are equal: (N,) is W shards of N / W. Encoded bytes go to ``room``, (W c(N/W),) uint8 or more; in two legs exact ones do too.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.comm.codec.codec import (
    Codec,
    as_bytes,
    check_summable,
    encode_slices,
    parse_codec,
    slice_lengths,
    sum_encoded,
)
from tightwire.comm.group.group import Group
from tightwire.comm.group.nodes import run_leg
from tightwire.comm.protocols import Moved, nothing_told
from tightwire.comm.transport.legs import exchange_encoded

NONE = parse_codec("none")
_INDEX_TYPES = (torch.int32, torch.int64)
_COUNT_BYTES = 8


def all_gather(group: Group, x: Tensor, codec: Codec = NONE, *, phase: str = "", site: str = "") -> list[Tensor]:
    """The ranks' tensors in rank order; all have the shape and dtype of ``x``. Cost: ``all_gather_bytes``, one round.

    Without a codec any dtype is allowed, and this rank's entry may share memory with ``x``. With a codec every entry,
    this rank's too, is decoded from its encoding: all ranks hold the same bits. Raises TypeError for a dtype that
    cannot be encoded.
    """
    if not codec.exact:
        check_summable(x)
    if group.world_size == 1 or x.numel() == 0:
        return [x.contiguous() for _ in range(group.world_size)]
    coding = group.ledger.coding_if(not codec.exact)
    exact_bytes = None if codec.exact else all_gather_bytes(group.world_size, x.numel(), x.element_size())
    with group.recorded("all_gather", _label(codec), x.nbytes, exact_bytes, phase=phase, site=site):
        flat_N = x.contiguous().view(-1)
        with coding:
            encoded = codec.encode(flat_N)
        received = group.transport.gather(encoded)
        with coding:
            return [codec.decode(buf, flat_N.numel(), x.dtype).view(x.shape) for buf in received]


def all_gather_bytes(world_size: int, num_elems: int, elem_bytes: int, codec: Codec = NONE) -> int:
    """(W-1) c(n), where c is ``codec.wire_bytes``."""
    return (world_size - 1) * codec.wire_bytes(num_elems, elem_bytes)


def all_gather_into(
    group: Group,
    part_N: Tensor,
    out_WN: Tensor,
    codec: Codec = NONE,
    exact_bytes: int = 0,
    moved: Moved = nothing_told,
    *,
    phase: str = "",
    site: str = "",
) -> None:
    """Gather the ranks' parts into ``out_WN`` unchanged, for bytes that are encoded once and gathered often.

    Cost: (W-1) N bytes, one round; nothing is allocated. ``part_N``: (N,) uint8, of one length on all ranks; may be
    this rank's own part of ``out_WN``, (W N,) uint8. ``codec``: the codec of the bytes, for the ledger.
    ``exact_bytes``: the bytes that this rank would send without encoding; used only with a codec. ``moved``: called as
    bytes of ``out_WN`` arrive, where the host sees that.
    """
    if part_N.numel() == 0 or group.world_size == 1:
        out_WN.copy_(part_N)
        return
    exact = None if codec.exact else exact_bytes
    with group.recorded("all_gather", _label(codec), part_N.nbytes, exact, phase=phase, site=site):
        group.transport.gather_into(part_N, out_WN, moved)


def reduce_scatter(group: Group, x: Tensor, codec: Codec = NONE, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's slice, (``reduce_scatter_slices(...)[rank]``,), of the sum of the ranks' flattened tensors.

    One round. The owner sums a slice in float32 in rank order and rounds once to ``dtype`` (default: that of ``x``).
    Error: ``quantized_sum_bound`` and the last rounding. Cost: ``reduce_scatter_bytes``. Raises TypeError for other
    dtypes.
    """
    check_summable(x)
    dtype = dtype or x.dtype
    if group.world_size == 1 or x.numel() == 0:
        return x.contiguous().view(-1).to(dtype, copy=True)
    lengths, ledger = reduce_scatter_slices(x.numel(), group.world_size, codec), group.ledger
    exact_bytes = None if codec.exact else (x.numel() - lengths[group.rank]) * x.element_size()
    with group.recorded("reduce_scatter", _label(codec), x.nbytes, exact_bytes):
        received = exchange_encoded(group.transport, x.contiguous().view(-1), lengths, codec, ledger)
        with ledger.coding_if(not codec.exact):
            return sum_encoded(received, lengths[group.rank], codec, x.dtype).to(dtype)


def reduce_scatter_slices(num_elems: int, world_size: int, codec: Codec = NONE) -> list[int]:
    """Elements of each rank's slice: ceil(n / W) rounded up to whole groups; the last ones may be short or empty."""
    return slice_lengths(num_elems, world_size, codec.group_elems)


def reduce_scatter_bytes(rank: int, world_size: int, num_elems: int, elem_bytes: int, codec: Codec = NONE) -> int:
    """Encoded bytes of the other ranks' slices: about (W-1)/W c(n)."""
    lengths = reduce_scatter_slices(num_elems, world_size, codec)
    return sum(codec.wire_bytes(length, elem_bytes) for owner, length in enumerate(lengths) if owner != rank)


def broadcast(group: Group, x: Tensor, root: int = 0, *, phase: str = "", site: str = "") -> Tensor:
    """Return ``root``'s tensor on every rank; other ranks pass a tensor of the same shape and dtype, whose values are unused.

    On ``root`` the result may share memory with ``x``. Any dtype. Cost: root sends (W-1) M; one round.
    """
    if not 0 <= root < group.world_size:
        raise ValueError(f"root must be 0 to {group.world_size - 1}, got {root}")
    if group.world_size == 1 or x.numel() == 0:
        return x.contiguous()
    with group.recorded("broadcast", "direct", x.nbytes, phase=phase, site=site):
        own = x.contiguous() if group.rank == root else x.new_empty(0)
        sizes = [x.nbytes if rank == root else 0 for rank in range(group.world_size)]
        return group.transport.gather(as_bytes(own.view(-1)), sizes)[root].view(x.dtype).view(x.shape)


def gather_to_root(
    group: Group, x: Tensor, sizes: Sequence[int], root: int = 0, *, phase: str = "", site: str = ""
) -> list[Tensor] | None:
    """All ranks' bytes in rank order on ``root``; None on the others.

    ``x``: (sizes[rank],) uint8; ``sizes``: the same list on all ranks, some but not all may be zero. Cost: one round;
    each rank but ``root`` sends the longest size, rounded up to a multiple of 8, because ``exchange`` needs messages of
    one length.
    """
    if group.world_size == 1:
        return [x.contiguous()]
    length = -(-max(sizes) // 8) * 8  # so that consecutive messages are aligned for every dtype
    with group.recorded("gather_to_root", "direct", length, phase=phase, site=site):
        padded = x.contiguous() if x.numel() == length else F.pad(x, (0, length - x.numel()))
        received = group.transport.exchange([padded if rank == root else x[:0] for rank in range(group.world_size)])
    if group.rank != root:
        return None
    return [message[:size] for message, size in zip(received, sizes, strict=True)]


def sparse_all_gather(group: Group, indices_K: Tensor, values_K: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The ranks' (indices, values), in rank order; each rank may have its own number K of pairs, or none.

    ``indices_K``: (K,) int32 or int64; ``values_K``: (K,) float32, bfloat16 or float16; this rank's pair may share
    memory with them. Raises TypeError or ValueError for others. Cost: ``sparse_all_gather_bytes``; two rounds, first
    for the counts.
    """
    if indices_K.dtype not in _INDEX_TYPES:
        raise TypeError(f"indices must be {' or '.join(map(str, _INDEX_TYPES))}, got {indices_K.dtype}")
    check_summable(values_K)
    if indices_K.dim() != 1 or indices_K.shape != values_K.shape:
        raise ValueError(
            f"indices and values must be one-dimensional and of equal length, got {tuple(indices_K.shape)} and {tuple(values_K.shape)}"
        )
    if group.world_size == 1:
        return [(indices_K, values_K)]
    index_bytes, pair_bytes = indices_K.element_size(), indices_K.element_size() + values_K.element_size()
    with group.recorded("sparse_all_gather", "direct", indices_K.nbytes + values_K.nbytes):
        own_count = torch.tensor([indices_K.numel()], device=indices_K.device)
        counts = [int(buf.view(torch.int64)) for buf in group.transport.gather(as_bytes(own_count))]
        own = torch.cat([as_bytes(indices_K.contiguous()), as_bytes(values_K.contiguous())])
        received = [own] * len(counts)
        if any(counts):
            received = group.transport.gather(own, [count * pair_bytes for count in counts])
    pairs = []
    for count, buf in zip(counts, received, strict=True):
        # Cloned because a part of a message may not be aligned for its dtype.
        indices, values = buf[: count * index_bytes].clone(), buf[count * index_bytes :].clone()
        pairs.append((indices.view(indices_K.dtype), values.view(values_K.dtype)))
    return pairs


def sparse_all_gather_bytes(world_size: int, num_pairs: int, index_bytes: int, value_bytes: int) -> int:
    """(W-1) (8 + K (index bytes + value bytes)), with this rank's K."""
    return (world_size - 1) * (_COUNT_BYTES + num_pairs * (index_bytes + value_bytes))


def _label(codec: Codec) -> str:
    return "direct" if codec.exact else codec.name


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
