"""Measures what a rank uses: resident memory, bytes on its node's interface, and the rate of its collectives."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch

from tightwire.comm.group.group import Group
from tightwire.comm.link.emulated_network import WIRE
from tightwire.training.ranks.groups import TrainGroups

_HEADER_BYTES = 14 + 20 + 32  # per packet, acknowledgements too: Ethernet, IPv4, TCP with timestamps
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20
_TRIES = 3


def reset_peak() -> int | None:
    """Reset the peak of resident memory. Returns the current resident bytes, or None if not known on this system."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def grown_by(before: int | None) -> int | None:
    """The peak since ``reset_peak``, minus ``before``, which it returned."""
    peak = _status_bytes("VmHWM")
    return None if before is None or peak is None else peak - before


def _status_bytes(key: str) -> int | None:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


class Sent(NamedTuple):
    """Counts of all processes of the node since its interface was created."""

    num_bytes: int
    num_packets: int

    @property
    def payload_bytes(self) -> int:
        return self.num_bytes - _HEADER_BYTES * self.num_packets

    def since(self, before: Self) -> "Sent":
        return Sent(self.num_bytes - before.num_bytes, self.num_packets - before.num_packets)


def sent_by_node(text: str | None = None) -> Sent:
    """Read the counters in this process's network namespace. ``text``: the content of /proc/net/dev."""
    for line in (Path("/proc/net/dev").read_text() if text is None else text).splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == WIRE:
            words = counts.split()
            return Sent(int(words[8]), int(words[9]))
    raise RuntimeError("this process is not on an emulated node")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Seconds of an all-gather with ``num_bytes`` per rank, on all ranks at once. ``where``: inside or across nodes."""

    where: str
    num_bytes: int
    num_peers: int  # ranks that each rank sends to
    seconds: float


def probe_link(world: Group, groups: TrainGroups) -> Iterator[Probed]:
    """Time all-gathers of 1 KiB and 1 MiB across and inside nodes."""
    nodes = groups.main.nodes
    assert nodes is not None
    for where, leg in (("across", nodes.across), ("inside", nodes.inside)):
        for num_bytes in (_SMALL_BYTES, _LARGE_BYTES):
            buf = torch.zeros(num_bytes, dtype=torch.uint8)
            leg.transport.gather(buf)
            seconds = []
            for _ in range(_TRIES):
                world.transport.barrier()
                begun = time.perf_counter()
                leg.transport.gather(buf)
                seconds.append(time.perf_counter() - begun)
            median_s = statistics.median(seconds)
            yield Probed(where=where, num_bytes=num_bytes, num_peers=leg.world_size - 1, seconds=median_s)
