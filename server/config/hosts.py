"""Flags of a server on several hosts. The same command starts every host; a launcher's variables fill what is not given."""

import re
from dataclasses import dataclass

from tightwire.option import option, require, require_seconds

DEFAULT_PORT = 29600


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """Several hosts: start the same command on each. torchrun, Slurm and LeaderWorkerSet set the first three."""

    nnodes: int | None = option(
        None,
        "hosts (nodes) that hold the ranks, equally many on each; default: from torchrun's, Slurm's or LeaderWorkerSet's "
        "variables, else 1. (--nodes divides the ranks of one host into nodes, for tests)",
    )
    node_rank: int | None = option(
        None, "number of this host, from 0; node 0 serves the API. Default: from the launcher's variables", metavar="R"
    )
    master_addr: str | None = option(
        None,
        f"node 0's address, with the port where nodes meet ({DEFAULT_PORT} if left out); default: from the launcher's variables",
        metavar="HOST[:PORT]",
    )
    interface: str | None = option(
        None, "network interface towards the other hosts; default: the one the kernel routes to node 0"
    )
    port_range: str = option(
        "29601-29740",
        "ports that nodes listen on for each other: one of node 0, and two a rank; gloo and NCCL take others, which the kernel "
        "gives them",
        metavar="A-B",
    )
    join_timeout_s: float = option(300.0, "longest wait for all nodes to start and to open the model", metavar="S")

    def __post_init__(self) -> None:
        require(self.nnodes is None or 1 <= self.nnodes <= 64, "nnodes", self.nnodes, "1 to 64")
        require(self.node_rank is None or self.node_rank >= 0, "node_rank", self.node_rank, "at least 0")
        if self.nnodes is not None and self.node_rank is not None:
            require(self.node_rank < self.nnodes, "node_rank", self.node_rank, f"0 to {self.nnodes - 1}")
        require(self.master_addr != "", "master_addr", self.master_addr, "an address, or left out")
        if self.master_addr is not None:
            split_address(self.master_addr)
        require_seconds("join_timeout_s", self.join_timeout_s)
        require(len(self.ports) > 0, "port_range", self.port_range, "A-B with 1 <= A <= B <= 65535")

    @property
    def ports(self) -> range:
        """The declared ports; empty if they are not valid."""
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", self.port_range)
        first, last = (int(found[1]), int(found[2])) if found else (0, 0)
        return range(first, last + 1) if 1 <= first <= last <= 65535 else range(0)

    @property
    def several(self) -> bool:
        return (self.nnodes or 1) > 1


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT, [IPV6]:PORT or IPV6. ValueError: another form."""
    found = re.fullmatch(r"\[([0-9a-fA-F:.%\w]+)\](?::(\d{1,5}))?|([^\[\]:]+)(?::(\d{1,5}))?", text)
    if found is None and text.count(":") > 1 and "[" not in text:
        return text, DEFAULT_PORT  # an IPv6 address
    port = int((found[2] or found[4] or DEFAULT_PORT) if found else 0)
    if found is None or not 0 < port < 65536:
        raise ValueError(f"--master-addr must be HOST, HOST:PORT or [IPV6]:PORT, got {text!r}")
    return found[1] or found[3], port
