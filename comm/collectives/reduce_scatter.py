"""Reduce-scatter: every rank gets its own slice of the sum of all ranks' tensors, in one round.

For ranks on several nodes ``qgz`` has one in two legs, of which the leg between nodes carries fewer bytes.
"""

import torch
from torch import Tensor

from tightwire.comm.codec.codec import NONE, Codec, check_summable, slices_for, sum_encoded
from tightwire.comm.group.group import Group
from tightwire.comm.group.legs import exchange_encoded


def reduce_scatter(group: Group, x: Tensor, codec: Codec = NONE, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's slice, (``slices_for(...)[rank]``,), of the sum of the ranks' flattened tensors.

    One round. The owner sums a slice in float32 in rank order and rounds once to ``dtype`` (default: that of ``x``).
    Error: ``quantized_sum_bound`` and the last rounding. Cost: ``reduce_scatter_bytes``. Raises TypeError for other
    dtypes.
    """
    check_summable(x)
    dtype = dtype or x.dtype
    if group.world_size == 1 or x.numel() == 0:
        return x.contiguous().view(-1).to(dtype, copy=True)
    lengths = slices_for(x.numel(), group.world_size, codec)
    exact_bytes = None if codec.exact else (x.numel() - lengths[group.rank]) * x.element_size()
    with group.recorded("reduce_scatter", codec.label, x.nbytes, exact_bytes):
        received = exchange_encoded(group, x.contiguous().view(-1), lengths, codec)
        with group.ledger.coding_if(not codec.exact):
            return sum_encoded(received, lengths[group.rank], codec, x.dtype).to(dtype)


def reduce_scatter_bytes(rank: int, world_size: int, num_elems: int, elem_bytes: int, codec: Codec = NONE) -> int:
    """Encoded bytes of the other ranks' slices: about (W-1)/W c(n)."""
    lengths = slices_for(num_elems, world_size, codec)
    return sum(codec.wire_bytes(length, elem_bytes) for owner, length in enumerate(lengths) if owner != rank)
