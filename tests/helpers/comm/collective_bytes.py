"""Formulas of the bytes that a rank sends in collectives whose bytes only tests need."""

from collections.abc import Sequence

from tightwire.comm.codec.codec import NONE, Codec
from tightwire.comm.collectives.qgz import hierarchical_bytes
from tightwire.comm.group.group import Group


def broadcast_bytes(rank: int, world_size: int, num_elems: int, elem_bytes: int, root: int = 0) -> int:
    """(W-1) M from the root, nothing from the others."""
    return (world_size - 1) * num_elems * elem_bytes if rank == root else 0


def gather_to_root_bytes(rank: int, sizes: Sequence[int]) -> int:
    """The longest size, rounded up to a multiple of 8, from each rank but 0."""
    return 0 if rank == 0 else -(-max(sizes) // 8) * 8


def hierarchical_reduce_scatter_bytes(
    group: Group, num_elems: int, elem_bytes: int, inside_codec: Codec = NONE, across_codec: Codec = NONE
) -> int:
    """Bytes inside and between nodes."""
    assert group.nodes is not None
    shape = group.nodes.across.world_size, group.nodes.inside.world_size
    return sum(hierarchical_bytes(group.rank, *shape, num_elems, elem_bytes, inside_codec, across_codec))
