"""Connects the ranks of a group with one TCP connection for each pair, after both ends have proved that they know a secret.

Each rank listens on a free port of its address, tells the others through the store, connects to all lower ranks and accepts
all higher ones. A connection begins with three messages of fixed size:

    connecting rank -> hello: magic, both ranks, the world size, a nonce
    accepting rank  -> a nonce, HMAC(key, "accept" hello nonce)
    connecting rank -> HMAC(key, "connect" hello nonce)

The key is HMAC-SHA256 of a random token of this group, which rank 0 tells through the store, with the shared secret. Without
a secret the key keeps out only strangers that cannot read the store. Nothing is encrypted.
"""

import fcntl
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks

if TYPE_CHECKING:  # the parent process checks the secret and does not import torch
    from tightwire.comm.transport.store_notes import FactExchange

_HELLO, _MAGIC, _NONCE_BYTES = struct.Struct(">8sIII"), b"TWsocket", 16
_PROOF_BYTES = 32  # size of a SHA-256 digest
_STRANGER_S = 5.0  # the longest wait for the hello of a connection that may be a stranger's
_MIN_SECRET_BYTES = 16
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


class SocketOptions(NamedTuple):
    """The secret that ranks must know (without one, all that join over the store may connect), and a port, 0 for any free one."""

    secret: bytes = b""
    port: int = 0
    most_unsent: int = 0  # bytes of a connection in the kernel, for which others on the wire wait; 0: as it chooses
    codes: bool = False  # long messages are coded without loss (``wire_codec``); the same on all ranks
    dead_s: float = 15.0  # without even acknowledgements by the other host's kernel: the connection is lost; 3 or more


class Peer(NamedTuple):
    """A rank's listening address. ``machine`` and some of ``cores`` are equal for ranks that share cores, even in
    different network namespaces."""

    address: str
    port: int
    machine: str
    cores: frozenset[int] = frozenset()

    def shares_cores(self, other: "Peer") -> bool:
        return self.machine == other.machine and (self.cores == other.cores or not self.cores.isdisjoint(other.cores))


def read_secret(path: str | None) -> bytes:
    """The secret in a file without white space around it; empty without a file. ValueError: unreadable, or below 16 bytes."""
    if path is None:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"the shared secret cannot be read from {path}: {error.strerror}") from None
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(
            f"the shared secret in {path} has {len(secret)} bytes and needs at least {_MIN_SECRET_BYTES}; write one with "
            f"`openssl rand -hex 32 > {path}` and copy the file to every host"
        )
    return secret


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface. ValueError: it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("40s", name.encode()[:15]))
        except OSError as error:
            raise ValueError(f"network interface {name} has no IPv4 address: {error.strerror}") from None
    return socket.inet_ntoa(answer[20:24])


def source_address(towards: str) -> str:
    """This host's address on the route to another. Connecting a UDP socket sends no packet."""
    family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def connect_ranks(
    facts: "FactExchange", address: str, options: SocketOptions, timeout_s: float
) -> tuple[dict[int, socket.socket], list[Peer]]:
    """Return a connection to each other rank, and where each rank is. Collective.

    Others reach this rank at ``address``. Raises CollectiveTimeoutError with the ranks that did not connect,
    CommError for one that cannot be reached or has another secret.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, options.port), family=family, backlog=facts.world_size)
    except OSError as error:
        where = f"{address} port {options.port}"
        raise CommError(f"rank {facts.rank} cannot listen on {where}: {error.strerror}", [facts.rank]) from error
    with listener, ExitStack() as opened:
        port, token = listener.getsockname()[1], secrets.token_hex(_NONCE_BYTES)
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        told = facts.share("sockets", f"{address} {port} {_machine()} {cores} {token} {int(options.codes)}".encode())
        words = [fact.decode().split() for fact in told]
        peers = [
            Peer(host, int(port), machine, frozenset(map(int, cores.split(","))))
            for host, port, machine, cores, *_ in words
        ]
        if unlike := [rank for rank, own in enumerate(words) if own[5] != words[0][5]]:
            raise CommError(
                f"{name_ranks(unlike)} and rank 0 have different --sum-dtype; give all hosts the same", unlike
            )
        key = hmac.digest(options.secret, words[0][4].encode(), "sha256")
        sockets = _Joining(facts.rank, peers, key, time.monotonic() + timeout_s).connect(opened, listener)
        for sock in sockets.values() if options.most_unsent else ():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.most_unsent)
        opened.pop_all()
        return sockets, peers


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class _Joining:
    """One rank's handshakes. All ranks take the same four steps, and each step waits only for earlier steps of others."""

    def __init__(self, rank: int, peers: list[Peer], key: bytes, deadline: float) -> None:
        self._rank, self._peers, self._key, self._deadline = rank, peers, key, deadline

    def connect(self, opened: ExitStack, listener: socket.socket) -> dict[int, socket.socket]:
        lower = {peer: self._greet(opened, peer) for peer in range(self._rank)}
        higher = self._accept(opened, listener)
        for peer, (sock, hello) in lower.items():
            with self._naming(peer):
                nonce = self._receive(sock, _NONCE_BYTES)
                self._check(self._receive(sock, _PROOF_BYTES), b"accept" + hello + nonce)
                sock.sendall(self._proof(b"connect" + hello + nonce))
        for peer, (sock, greeting) in higher.items():
            with self._naming(peer):
                self._check(self._receive(sock, _PROOF_BYTES), b"connect" + greeting)
        return {peer: sock for peer, (sock, _) in (lower | higher).items()}

    def _greet(self, opened: ExitStack, peer: int) -> tuple[socket.socket, bytes]:
        at, hello = self._peers[peer], self._hello(self._rank, peer) + secrets.token_bytes(_NONCE_BYTES)
        with self._naming(peer):
            sock = opened.enter_context(socket.create_connection((at.address, at.port), timeout=self._left_s()))
            sock.sendall(hello)
        return sock, hello

    def _accept(self, opened: ExitStack, listener: socket.socket) -> dict[int, tuple[socket.socket, bytes]]:
        """The connections from all higher ranks, each with its hello and the nonce of the answer. Strangers are dropped."""
        higher: dict[int, tuple[socket.socket, bytes]] = {}
        while missing := set(range(self._rank + 1, len(self._peers))) - set(higher):
            listener.settimeout(self._left_s())
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                raise self._late(missing) from None
            try:
                hello = self._receive(sock, _HELLO.size + _NONCE_BYTES, _STRANGER_S)
            except (OSError, EOFError):
                hello = b""
            peer = next((peer for peer in missing if hello.startswith(self._hello(peer, self._rank))), None)
            if peer is None:
                sock.close()
                continue
            nonce = secrets.token_bytes(_NONCE_BYTES)
            higher[peer] = opened.enter_context(sock), hello + nonce
            with self._naming(peer):
                sock.sendall(nonce + self._proof(b"accept" + hello + nonce))
        return higher

    def _hello(self, sender: int, receiver: int) -> bytes:
        return _HELLO.pack(_MAGIC, sender, receiver, len(self._peers))

    def _proof(self, greeting: bytes) -> bytes:
        return hmac.digest(self._key, greeting, "sha256")

    def _check(self, proof: bytes, greeting: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof(greeting)):
            raise EOFError

    def _receive(self, sock: socket.socket, num_bytes: int, most_s: float = float("inf")) -> bytes:
        received = b""
        while len(received) < num_bytes:
            sock.settimeout(min(most_s, self._left_s()))
            piece = sock.recv(num_bytes - len(received))
            if not piece:
                raise EOFError  # a rank that finds another secret closes the connection
            received += piece
        return received

    @contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        """Convert errors of the connection to ``peer`` into ones that name it."""
        at = self._peers[peer]
        try:
            yield
        except TimeoutError:
            raise self._late([peer]) from None
        except EOFError:
            raise CommError(
                f"rank {self._rank} and rank {peer} at {at.address} have different shared secrets; give all hosts the same file "
                "with --comm-secret-file",
                [peer],
            ) from None
        except OSError as error:
            raise CommError(
                f"rank {self._rank} cannot connect to rank {peer} at {at.address} port {at.port}: {error.strerror}; check the "
                "network and the firewalls between the two hosts",
                [peer],
            ) from error

    def _late(self, missing: Collection[int]) -> CollectiveTimeoutError:
        places = ", ".join(self._peers[peer].address for peer in sorted(missing))
        own = self._peers[self._rank]
        return CollectiveTimeoutError(
            f"rank {self._rank} at {own.address} port {own.port} has no connection to {name_ranks(missing)} of "
            f"{len(self._peers)} at {places} in time; check the network and the firewalls between the hosts",
            missing,
        )

    def _left_s(self) -> float:
        return max(0.01, self._deadline - time.monotonic())
