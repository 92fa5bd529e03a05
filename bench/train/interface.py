"""Reads the bytes that left an emulated node from the kernel's counters."""

from pathlib import Path
from typing import NamedTuple, Self

from tightwire.comm.link.emulated_network import WIRE

_HEADERS = 14 + 20 + 32  # per packet, acknowledgements too: Ethernet, IPv4, TCP with timestamps


class Sent(NamedTuple):
    """Counts of all processes of the node since the interface was created."""

    num_bytes: int
    num_packets: int

    @property
    def payload_bytes(self) -> int:
        return self.num_bytes - _HEADERS * self.num_packets

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
