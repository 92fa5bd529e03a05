"""Hosts of a bench on this machine: network namespaces joined by a bridge at one rate, each with its share of the cores.

    with EmulatedHosts("200mbit", 2) as hosts, hosts.visiting():
        ServerProcess(*hosts.serve(["smollm2-135m", "--tp", "2"]), {}, log=log)

Hosts share memory bandwidth and caches, and a core if there are fewer cores than hosts. Needs root, iproute2 and util-linux.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from tightwire.comm.link.emulated_network import WIRE, EmulatedNetwork, NoEmulatedNetworkError, enter_namespace
from tightwire.comm.link.link import parse_link
from tightwire.comm.link.wire import NAMESPACES

_FIRST_PORT, _PORTS = 29600, 100  # of the first server, and of each
_BYTES, _FRAMES = 8, 9  # sent: fields of /proc/net/dev


class Sent(NamedTuple):
    """Bytes and frames that an interface has sent."""

    bytes: int
    frames: int

    def since(self, before: "Sent") -> "Sent":
        return Sent(self.bytes - before.bytes, self.frames - before.frames)


def read_sent(counters: str) -> Sent:
    """The totals of an emulated wire from the text of a /proc/net/dev; RuntimeError without such an interface."""
    for line in counters.splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == WIRE:
            return Sent(*map(int, fields.split()[_BYTES : _FRAMES + 1]))
    raise RuntimeError("this process is not on an emulated node")


class EmulatedHosts:
    """``num_hosts`` hosts from construction to ``close``. ValueError: not possible here, or ``link`` has a latency."""

    def __init__(self, link: str, num_hosts: int) -> None:
        parsed = parse_link(link)
        if parsed.latency_s:
            raise ValueError(f"--link {link}: hosts have the latency of this machine's bridge; give a rate only")
        try:
            self._network = EmulatedNetwork(parsed, num_nodes=num_hosts)
        except NoEmulatedNetworkError as error:
            raise ValueError(f"hosts cannot be emulated: {error}") from error
        self.link, self.num_hosts, self._num_servers = parsed, num_hosts, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._network.close()

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self._network.nodes]

    def cores(self, host: int) -> str:
        """The share of ``host``, such as "0,1"."""
        cores = sorted(os.sched_getaffinity(0))
        share = cores[host * len(cores) // self.num_hosts : (host + 1) * len(cores) // self.num_hosts]
        return ",".join(map(str, share or [cores[host % len(cores)]]))

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """``command`` as it runs on ``host``."""
        namespace = f"--net=/proc/{self._network.nodes[host].pid}/ns/net"
        return ["nsenter", namespace, "taskset", "--cpu-list", self.cores(host), *command]

    def serve(self, argv: Sequence[str]) -> tuple[list[str], list[list[str]]]:
        """`tightwire serve` with these arguments: host 0's command, and those of the others. Each server has its own ports."""
        first = _FIRST_PORT + _PORTS * self._num_servers
        self._num_servers += 1
        meeting = ["--nnodes", str(self.num_hosts), "--master-addr", f"{self.addresses[0]}:{first}"]
        meeting += ["--port-range", f"{first + 1}-{first + _PORTS - 1}"]
        serve = [sys.executable, "-m", "tightwire", "serve", *argv, *meeting]
        ports = ["{port}", *["0"] * (self.num_hosts - 1)]
        head, *others = [
            self.on(host, [*serve, "--node-rank", str(host), "--port", port]) for host, port in enumerate(ports)
        ]
        return head, others

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """Move this thread to host 0 for the block, with the processes that it starts there."""
        with open("/proc/thread-self/ns/net", "rb") as home:
            self._network.nodes[0].enter()
            try:
                yield
            finally:
                enter_namespace(home.fileno())

    def sent(self) -> Sent:
        """The totals of host 0's interface, with the headers of all layers."""
        return read_sent(Path(f"/proc/{self._network.nodes[0].pid}/net/dev").read_text())

    def facts(self) -> dict[str, Any]:
        """The link as ``GET /comm`` describes an emulated one, with its measured rate."""
        asked = {"name": self.link.name, "asked_bytes_per_s": self.link.bytes_per_s, "latency_s": 0.0}
        return asked | {"measured_bytes_per_s": self._network.measure(), "emulation": NAMESPACES, "reason": ""}
