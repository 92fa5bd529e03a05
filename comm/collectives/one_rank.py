"""Collectives with one rank at one end: broadcast from it, and gather to rank 0."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tightwire.comm.group.group import Group


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
        return group.transport.gather(own.view(-1).view(torch.uint8), sizes)[root].view(x.dtype).view(x.shape)


def gather_to_root(
    group: Group, x: Tensor, sizes: Sequence[int], *, phase: str = "", site: str = ""
) -> list[Tensor] | None:
    """Return all ranks' bytes in rank order on rank 0, and None on the others.

    Args:
        x: (sizes[rank],) uint8.
        sizes: the same list on all ranks; some but not all may be zero.
    Cost: one round; each rank but 0 sends the longest size, rounded up to a multiple of 8, because ``exchange``
    needs messages of one length.
    """
    if group.world_size == 1:
        return [x.contiguous()]
    length = -(-max(sizes) // 8) * 8  # so that consecutive messages are aligned for every dtype
    with group.recorded("gather_to_root", "direct", length, phase=phase, site=site):
        padded = x.contiguous() if x.numel() == length else F.pad(x, (0, length - x.numel()))
        received = group.transport.exchange([padded, *[x[:0]] * (group.world_size - 1)])
    if group.rank != 0:
        return None
    return [message[:size] for message, size in zip(received, sizes, strict=True)]
