"""Wraps groups so that messages can be switched off, which leaves only a step's computing.

The same engine alternates between steps with and without messages, so other programs affect both alike. Results of detached
steps are wrong: each message from another rank is replaced by this rank's own data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from tightwire.comm.group.group import Group
from tightwire.comm.protocols import Transport
from tightwire.comm.transport.emulated import WeightlessTransport


class Switch:
    """Switches all groups of a rank."""

    def __init__(self) -> None:
        self.is_detached = False

    @contextmanager
    def detached(self) -> Iterator[None]:
        self.is_detached = True
        try:
            yield
        finally:
            self.is_detached = False


class DetachableTransport:
    """A ``Transport``: ``transport``, or no messages while the switch is detached. No fused kernels."""

    fused = None

    def __init__(self, transport: Transport, switch: Switch) -> None:
        self._transport, self._switch = transport, switch
        self._alone = WeightlessTransport(transport.rank, transport.world_size)

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    def close(self) -> None:
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._alone if self._switch.is_detached else self._transport, name)


def detachable(group: Group, switch: Switch) -> Group:
    """``group`` and its node groups, all controlled by ``switch``."""
    nodes = group.nodes
    if nodes is not None:
        nodes = replace(nodes, inside=detachable(nodes.inside, switch), across=detachable(nodes.across, switch))
    return replace(group, transport=cast(Transport, DetachableTransport(group.transport, switch)), nodes=nodes)
