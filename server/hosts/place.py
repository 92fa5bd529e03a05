"""This node's address and interface towards the others, and its ports. Reads the kernel's routes and guesses nothing."""

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.transport.socket_join import interface_address, source_address
from tightwire.server.config.hosts import HostOptions, split_address
from tightwire.whole_folder import cache_folder, write_atomic

_LOOK_UP_S = 2.0  # from one look-up of a name to the next


class NotNowError(ValueError):
    """This host cannot find the master, or a port is taken: a later start may succeed."""


class UnknownNameError(NotNowError):
    """The master's name has no address here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlace:
    """This host among the hosts of a server. ``address`` is its own, on ``interface`` (empty: not known by name)."""

    node: int
    num_nodes: int
    address: str
    interface: str
    master: str  # node 0's address
    port: int  # where node 0 waits for the others
    ports: range

    def describe(self) -> str:
        at = f" ({self.interface})" if self.interface else ""
        others = f"node 0 at {joined(self.master, self.port)}, ports {self.ports.start} to {self.ports.stop - 1}"
        return f"node {self.node} of {self.num_nodes}: address {self.address}{at}, {others}"

    @property
    def store_port(self) -> int:
        return self.ports[0]

    def inbox(self, rank: int, address: str = "") -> str:
        """The zmq address where a rank of another node than 0 receives its steps, on its node's ``address`` or this one's."""
        return f"tcp://{joined(address or self.address, self.ports[1 + 2 * rank])}"

    def sum_port(self, rank: int) -> int:
        """Where a rank accepts the sockets of other ranks."""
        return self.ports[2 + 2 * rank]

    def listens(self, ranks: range) -> list[int]:
        """The ports of this node that other nodes connect to, with these ranks on it."""
        sums = [self.sum_port(rank) for rank in ranks]
        return [self.store_port, *sums] if self.node == 0 else [*(self.ports[1 + 2 * rank] for rank in ranks), *sums]


def _probe_path() -> Path:
    return cache_folder() / "network.json"


def keep_probe(link: LinkFacts) -> None:
    """Keep the network that a server on several hosts has probed, for ``explain --network``, if the cache can be written."""
    with contextlib.suppress(OSError):
        _probe_path().parent.mkdir(parents=True, exist_ok=True)
        write_atomic(_probe_path(), msgspec.json.encode(link))


def last_probe() -> LinkFacts:
    """The network that ``keep_probe`` has kept. ValueError: there is none."""
    try:
        return msgspec.json.decode(_probe_path().read_bytes(), type=LinkFacts)
    except (OSError, msgspec.MsgspecError) as error:
        writer = "node 0 of `tightwire serve --nnodes N` writes it when all nodes have joined"
        raise ValueError(f"--network: no probe in {_probe_path()} ({error}); {writer}") from None


def joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def find_place(options: HostOptions) -> HostPlace:
    """This host's place. NotNowError: the master's name has no address, or no route. ValueError: no such interface."""
    assert options.nnodes is not None and options.node_rank is not None and options.master_addr is not None
    name, port = split_address(options.master_addr)
    try:
        master = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        why = error.strerror or error
        raise UnknownNameError(f"--master-addr {name}: this host finds no address for it: {why}") from None
    target = ipaddress.ip_address(master.partition("%")[0])
    if target.is_unspecified or (target.is_loopback and name not in ("localhost", master)):
        here = f"{master} on this host (/etc/hosts?), where other hosts cannot reach it"
        raise ValueError(f"--master-addr {name} is {here}; give node 0's address")
    if ":" in master and target.is_link_local:
        why = f"--master-addr {name} is a link-local address, which names no interface"
        such = "such as fd00::1/64 and fd00::2/64 (ip addr add fd00::1/64 dev INTERFACE)"
        raise ValueError(f"{why}; give both hosts addresses of one network, {such}")
    if options.interface is None:
        address = _routed_address(master)
        interface = next((nic for nic, own in _addresses() if own == address), "")
    else:
        interface = options.interface
        address = next((own for nic, own in _addresses() if nic == interface and (":" in own) == (":" in master)), "")
        if not address:
            known = sorted({nic for nic, own in _addresses() if (":" in own) == (":" in master)})
            kind = f"no address of the kind of {master} on this host"
            raise ValueError(f"--interface {interface} has {kind}; choose {', '.join(known)}")
        if ipaddress.ip_address(address).is_loopback and not target.is_loopback:
            why = f"is this host's loopback, where other hosts cannot reach {address}"
            raise ValueError(f"--interface {interface} {why}; choose the one towards {master}, or leave it out")
    return HostPlace(
        node=options.node_rank,
        num_nodes=options.nnodes,
        address=address,
        interface=interface,
        master=master,
        port=port,
        ports=options.ports,
    )


def wait_for_place(options: HostOptions, name_s: float, say: Callable[[str], None]) -> HostPlace:
    """Like ``find_place``, but looks up a name without an address again and again for ``name_s``, and says so."""
    deadline_s = time.monotonic() + name_s
    while True:
        try:
            return find_place(options)
        except UnknownNameError as error:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise
            say(f"{error}; looking it up again for {left_s:.0f} s")
            time.sleep(min(_LOOK_UP_S, left_s))


def _routed_address(towards: str) -> str:
    try:
        return source_address(towards)
    except OSError as error:
        raise NotNowError(f"--master-addr {towards}: this host has no route to it: {error.strerror or error}") from None


def _addresses() -> Iterator[tuple[str, str]]:
    """Interfaces with their addresses: the first of IPv4, and those of IPv6 that are not link-local, which name no interface."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(ValueError):  # no address
            yield name, interface_address(name)
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, _, _, _, _, name = line.split()
        if not (address := ipaddress.IPv6Address(bytes.fromhex(digits))).is_link_local:
            yield name, str(address)


def listen(address: str, port: int) -> socket.socket:
    """A listening socket. NotNowError: the port is taken. ValueError: the address is not this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=64)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        kind = NotNowError if error.errno == errno.EADDRINUSE else ValueError
        free = "choose a free --port-range (or port of --master-addr), the same on every host"
        advice = f"{free}, and check that --master-addr is node 0's address"
        raise kind(f"this host cannot listen on {joined(address, port)}: {why}; {advice}") from None
