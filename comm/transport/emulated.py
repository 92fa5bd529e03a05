"""Transports that emulate a link in user space: a slower one on top of any transport, and one that sends nothing."""

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from tightwire.comm.link.link import Link
from tightwire.comm.protocols import FusedAllReduce, Moved, Transport, nothing_told

# A sleep may end this much late; the rest of a wait yields the core and polls the clock.
_SLEEP_SLACK_S = 150e-6


class ThrottledTransport:
    """``transport`` behind a ``link`` from this rank to the others.

    The link sends bytes in sequence: a call's bytes start when the link is free, take bytes / rate, and arrive one
    latency later. The messages of one call overlap, so a round costs one latency; the library's own all-reduce counts
    as a ring's 2 (N-1) rounds. Only the sender's end is throttled. The deadline starts when this rank's bytes have
    arrived. ``fused`` is None, because a fused AllReduce would bypass the link.
    """

    def __init__(self, transport: Transport, link: Link, beside: "ThrottledTransport | None" = None) -> None:
        """``beside``: another group's throttled transport of this rank, whose bytes take the same link."""
        self.rank, self.world_size = transport.rank, transport.world_size
        self.fused: FusedAllReduce | None = None
        self._transport, self._link = transport, link
        # When the link has sent everything it was given: one number.
        self._free_at = [0.0] if beside is None else beside._free_at

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        self._carry(sum(part.numel() for part in slices) - slices[self.rank].numel())
        return self._transport.exchange(slices)

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        self._carry((self.world_size - 1) * buf.numel())
        return self._transport.gather(buf, sizes)

    def gather_into(self, buf: Tensor, out: Tensor, moved: Moved = nothing_told) -> None:
        self._carry((self.world_size - 1) * buf.numel())
        self._transport.gather_into(buf, out, moved)

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        self._carry(buf.numel() if self.world_size > 1 else 0)
        return self._transport.shift(buf, recv_bytes)

    def deliver(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        self._carry(sum(part.numel() for part in parts) - parts[self.rank].numel())
        return self._transport.deliver(parts, recv_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        hops = 2 * (self.world_size - 1)
        self._carry(hops * x.numel() // self.world_size * x.element_size(), rounds=hops)
        return self._transport.all_reduce(x)

    def barrier(self) -> None:
        self._carry(0)
        self._transport.barrier()

    def close(self) -> None:
        self._transport.close()

    def _carry(self, num_bytes: int, rounds: int = 1) -> None:
        rate = self._link.bytes_per_s
        self._free_at[0] = free_at = max(self._free_at[0], time.perf_counter()) + (num_bytes / rate if rate else 0.0)
        _wait_until(free_at + rounds * self._link.latency_s)


def _wait_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        if left > _SLEEP_SLACK_S:
            time.sleep(left - _SLEEP_SLACK_S)
        else:
            os.sched_yield()


class AloneTransport:
    """A ``Transport`` of one rank without others: it receives its own messages at once, so that only computing takes time."""

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

    def deliver(self, parts: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        return [_sized(part, size) for part, size in zip(parts, recv_bytes, strict=True)]

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
