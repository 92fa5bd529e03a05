"""Opens the connections of ``bench train`` on a rank, and reads its memory and its node's byte counters."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.bench.hosts import read_sent
from tightwire.bench.train.options import TrainOptions
from tightwire.comm.group.group import Group, batch_loop_threads
from tightwire.comm.group.topology import Topology
from tightwire.comm.link.emulated_network import WIRE
from tightwire.comm.protocols import Transport
from tightwire.comm.transport.emulated import AloneTransport
from tightwire.training.ranks.groups import TrainGroups, open_train_groups

_HEADER_BYTES = 14 + 20 + 32  # per packet, acknowledgements too: Ethernet, IPv4, TCP with timestamps


@dataclass(slots=True)
class Switch:
    """Turns the messages of all groups of a rank off, which leaves a step's computing; its results are then wrong."""

    is_detached: bool = False


class DetachableTransport:
    """A ``Transport``: ``transport``, or no messages while the switch is detached. No fused kernels."""

    fused = None

    def __init__(self, transport: Transport, switch: Switch) -> None:
        self._transport, self._switch = transport, switch
        self._alone = AloneTransport(transport.rank, transport.world_size)

    @property
    def bytes_sent(self) -> int:
        return self._transport.bytes_sent

    def close(self) -> None:
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._alone if self._switch.is_detached else self._transport, name)


def detachable(groups: TrainGroups, switch: Switch) -> TrainGroups:
    """``groups`` and their node groups, all controlled by ``switch``. An engine that closes leaves them open."""

    def wrapped(group: Group) -> Group:
        if (nodes := group.nodes) is not None:
            nodes = replace(nodes, inside=wrapped(nodes.inside), across=wrapped(nodes.across))
        return replace(group, transport=cast(Transport, DetachableTransport(group.transport, switch)), nodes=nodes)

    return _SharedGroups(gather=wrapped(groups.gather), reduce=wrapped(groups.reduce), main=wrapped(groups.main))


class _SharedGroups(TrainGroups):
    def close(self) -> None:
        pass


@contextmanager
def open_groups(folder: str, world: Group, options: TrainOptions) -> Iterator[tuple[TrainGroups, Switch]]:
    """Open training's groups, and the switch that turns their messages off. ``folder``: where the ranks find each other."""
    switch = Switch()
    groups = open_train_groups(
        Topology(world.rank, world.world_size, num_nodes=options.nodes),
        store=FileStore(f"{folder}/training", world.world_size),
        device=torch.device("cpu"),
        timeout_s=options.timeout_s,
        interface=_interface(),
    )
    try:
        yield detachable(groups, switch), switch
    finally:
        groups.close()


@contextmanager
def open_torch(folder: str, world: Group) -> Iterator[None]:
    """Open torch.distributed's default group of all ranks, with gloo over the same link."""
    os.environ["GLOO_SOCKET_IFNAME"] = _interface() or "lo"
    store = FileStore(f"{folder}/torch", world.world_size)
    with batch_loop_threads():  # as our own transports do
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
        time.sleep(0.1)  # a thread takes its name when it first runs
    try:
        yield
    finally:
        dist.destroy_process_group()


def _interface() -> str | None:
    """The emulated node's interface; None where this process is not on one."""
    return WIRE if WIRE in (name for _, name in socket.if_nameindex()) else None


def reset_peak() -> int | None:
    """Reset the peak of resident memory. Returns the current resident bytes, or None if not known on this system."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def grown_by(before: int | None) -> int | None:
    """The peak since ``reset_peak``, minus ``before``, which it returned."""
    return None if before is None else _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == f"{key}:")


def sent_by_node() -> int:
    """Payload bytes of all processes in this network namespace since it was created."""
    sent = read_sent(Path("/proc/net/dev").read_text())
    return sent.bytes - _HEADER_BYTES * sent.frames
