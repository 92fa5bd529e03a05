"""All-gather: every rank gets all ranks' tensors, unchanged.

``sparse_all_gather`` gathers pairs of an index and a value, such as the sparse gradients of DGC (arXiv 1712.01887).
``gather_shards`` gathers quantized weights.
"""

import torch
from torch import Tensor

from tightwire.comm.codec.codec import Codec, check_summable
from tightwire.comm.group.group import Group
from tightwire.comm.protocols import Moved

_INDEX_TYPES = (torch.int32, torch.int64)
_COUNT_BYTES = 8


def all_gather(group: Group, x: Tensor, *, phase: str = "", site: str = "") -> list[Tensor]:
    """The ranks' tensors in rank order; all have the shape and dtype of ``x``, which may be any.

    This rank's entry may share memory with ``x``. Cost: (W-1) M; one round.
    """
    if group.world_size == 1 or x.numel() == 0:
        return [x.contiguous() for _ in range(group.world_size)]
    with group.recorded("all_gather", "direct", x.nbytes, phase=phase, site=site):
        received = group.transport.gather(x.contiguous().view(-1).view(torch.uint8))
        return [buf.view(x.dtype).view(x.shape) for buf in received]


def all_gather_into(
    group: Group, part_N: Tensor, out_WN: Tensor, codec: Codec, exact_bytes: int, moved: Moved, *, phase: str, site: str
) -> None:
    """Gather the ranks' parts into ``out_WN`` unchanged, for bytes that are encoded once and gathered often.

    Args:
        part_N: (N,) uint8, of one length on all ranks; may be this rank's own part of ``out_WN``.
        out_WN: (W N,) uint8.
        codec: the codec of the bytes, for the ledger.
        exact_bytes: the bytes that this rank would send without encoding; used only with a codec.
        moved: a function that is called as bytes of ``out_WN`` arrive, where the host sees that.
    Cost: (W-1) N bytes, one round; nothing is allocated.
    """
    if part_N.numel() == 0 or group.world_size == 1:
        out_WN.copy_(part_N)
        return
    exact = None if codec.exact else exact_bytes
    with group.recorded("all_gather", codec.label, part_N.nbytes, exact, phase=phase, site=site):
        group.transport.gather_into(part_N, out_WN, moved)


def sparse_all_gather(group: Group, indices_K: Tensor, values_K: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The ranks' (indices, values), in rank order; each rank may have its own number K of pairs, or none.

    Args:
        indices_K: (K,) int32 or int64.
        values_K: (K,) float32, bfloat16 or float16. This rank's pair in the result may share memory with both.
    Raises:
        TypeError, ValueError: other dtypes or shapes.
    Cost: ``sparse_all_gather_bytes``; two rounds, first for the counts.
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
        counts = [int(buf.view(torch.int64)) for buf in group.transport.gather(own_count.view(torch.uint8))]
        own = torch.cat([part.contiguous().view(torch.uint8) for part in (indices_K, values_K)])
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
