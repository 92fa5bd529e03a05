"""Wraps groups so that messages can be switched off, which leaves only a step's computing.

The same engine alternates between steps with and without messages, so other programs affect both alike. Results of detached
steps are wrong: each message from another rank is replaced by this rank's own data.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.comm.protocols import FusedAllReduce, Transport
from tightwire.comm.transport.weightless import WeightlessTransport


class Switch:
    """Switches all groups of a rank."""

    def __init__(self) -> None:
        self.is_detached = False

    @contextmanager
    def detached(self) -> Any:
        self.is_detached = True
        try:
            yield
        finally:
            self.is_detached = False


class DetachableTransport:
    """Uses ``transport``, or no messages while the switch is detached."""

    def __init__(self, transport: Transport, switch: Switch) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self.fused: FusedAllReduce | None = None
        self._transport, self._switch = transport, switch
        self._alone = WeightlessTransport(self.rank, self.world_size)

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    @property
    def _now(self) -> Transport:
        return self._alone if self._switch.is_detached else self._transport

    def exchange(self, slices: Sequence[Tensor]) -> list[Tensor]:
        return self._now.exchange(slices)

    def gather(self, buf: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        return self._now.gather(buf, sizes)

    def gather_into(self, buf: Tensor, out: Tensor) -> None:
        self._now.gather_into(buf, out)

    def shift(self, buf: Tensor, recv_bytes: int | None = None) -> Tensor:
        return self._now.shift(buf, recv_bytes)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._now.all_reduce(x)

    def barrier(self) -> None:
        self._now.barrier()

    def close(self) -> None:
        self._transport.close()


def detachable(group: Group, switch: Switch) -> Group:
    """``group`` and its node groups, all controlled by ``switch``."""
    whole = replace(group, transport=DetachableTransport(group.transport, switch))
    if group.nodes is None:
        return whole
    return replace(
        whole,
        nodes=replace(
            group.nodes,
            inside=replace(group.nodes.inside, transport=DetachableTransport(group.nodes.inside.transport, switch)),
            across=replace(group.nodes.across, transport=DetachableTransport(group.nodes.across.transport, switch)),
        ),
    )
