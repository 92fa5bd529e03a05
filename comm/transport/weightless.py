"""A transport whose messages take no time, for measuring an algorithm's encoding, adding and decoding alone.

The sums are wrong: a message from another rank holds this rank's own bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.protocols import FusedAllReduce, Moved, nothing_told


class WeightlessTransport:
    """A ``Transport`` of one rank alone; no other rank exists."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.fused: FusedAllReduce | None = None
        self.bytes_sent = 0

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        return [slices[self.rank]] * self.world_size

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        return [_sized(buf, size) for size in ([buf.numel()] * self.world_size if sizes is None else sizes)]

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        for part in out.view(self.world_size, buf.numel()):  # one by one, because ``buf`` may be one of them
            part.copy_(buf)

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        return _sized(buf, buf.numel() if recv_bytes is None else recv_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        raise ValueError(
            "native has no computing of its own: a library sums, and here is none; measure another AllReduce"
        )

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


def _sized(buf: Tensor, size: int) -> Tensor:
    """Return ``buf`` if it has ``size`` bytes, else zeros, which every codec decodes."""
    return buf if size == buf.numel() else torch.zeros(size, dtype=buf.dtype, device=buf.device)
