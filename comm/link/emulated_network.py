"""Nodes on one machine with a real wire between them: network namespaces, veth pairs, the kernel's own rate limit.

    with EmulatedNetwork(parse_link("1gbit"), num_nodes=2) as network:
        network.nodes[1].command(["sleep", "1"])       # the command line of a program on that node
        network.nodes[1].enter()                       # or: this thread moves there
        network.measure()                              # bytes per second that really pass

Each node is a namespace with one interface, joined to the others by a bridge in a namespace of its own, so that nothing
of the machine's own network is touched. Processes of one node reach each other through its loopback interface, which
no limit slows down. Needs root, and ``ip`` and ``tc`` of iproute2. Latency is not added here (that takes netem, which
many kernels lack): a transport that waits does it (``comm.transport.throttled``).

Namespaces are named after the process that made them, and so is a folder for Unix sockets that processes of unlike
nodes meet at (abstract ones are each namespace's own). All are removed at the end of the context; when the process dies
first, by a child that notices; when both are killed, by whoever makes the next network.
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from tightwire.comm.link.line_rate import line_rate
from tightwire.comm.link.link import Link

WIRE = "wire0"  # the interface of every node
_FOLDER = Path("/run/netns")  # where iproute2 keeps namespaces
_SOCKETS = Path("/run")  # short, as the names of Unix sockets must be; iproute2 needs it too
_NAME = re.compile(r"tightwire-(\d+)-[0-9a-f]{4}-(?:\d+|switch)")
_STEM = re.compile(r"tightwire-(\d+)-[0-9a-f]{4}")
_MAX_NODES = 64
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 20.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")

# Token bucket: what may pass at once, and so what of every message that follows a pause passes for free: as little as
# the rate bears. The largest packet before segmentation must fit, so slower wires are given smaller ones, of two Ethernet
# frames at least; and on top what the rate brings while the kernel's timer is late, or that is lost.
_PACKET_S = _LATE_S = 0.5e-3
_LEAST_BYTES, _MOST_PACKET_BYTES = 3 << 10, 64 << 10
_QUEUE_BYTES, _QUEUE_S = 4 << 20, 20e-3  # what waits at most: more than TCP lets wait, so that nothing is lost

# Begins when it is told to, or when its standard input ends: then the parent is dead, however it died, and what it had
# just started to make a namespace may still be about to.
_REMOVE = (
    'trap "" INT TERM HUP; read -r _ || sleep 0.5; folder=$1; shift; '
    'for name; do ip netns del "$name" 2>/dev/null; done; rm -rf -- "$folder"; exit 0'
)


class NoEmulatedNetworkError(RuntimeError):
    """This machine or this user cannot have one. The message says why."""


@dataclass(frozen=True, slots=True)
class EmulatedNode:
    """One end of the wire. ``interface`` is the one that gloo and NCCL are to use."""

    namespace: str
    address: str
    interface: str = WIRE

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as a command line that runs on this node."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def enter(self) -> None:
        """Move the calling thread here for good, and whatever threads and processes it starts from now on."""
        with open(_FOLDER / self.namespace, "rb") as file:
            if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot enter the namespace {self.namespace}: {os.strerror(code)}")

    def visit(self, fn: Callable[[], _T]) -> _T:
        """The result of ``fn``, run here by a thread of its own; a socket it makes stays one of this node."""
        results: list[_T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                self.enter()
                results.append(fn())
            except Exception as error:  # noqa: BLE001, raised again by the caller's thread
                errors.append(error)

        visitor = threading.Thread(target=run)
        visitor.start()
        visitor.join()
        if errors:
            raise errors[0]
        return results[0]


class EmulatedNetwork:
    """``num_nodes`` nodes that each send and receive at the rate of ``link``, whoever they talk to.

    Raises:
        NoEmulatedNetworkError: not possible here; nothing is left behind.
    """

    def __init__(self, link: Link, *, num_nodes: int = 2) -> None:
        if not 2 <= num_nodes <= _MAX_NODES:
            raise ValueError(f"an emulated network has 2 to {_MAX_NODES} nodes, got {num_nodes}")
        if reason := why_impossible():
            raise NoEmulatedNetworkError(reason)
        _sweep()
        self.link = link
        stem = f"tightwire-{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = _SOCKETS / stem  # of this user alone
        self.nodes = tuple(EmulatedNode(f"{stem}-{i}", f"10.0.0.{i + 1}") for i in range(num_nodes))
        self._switch = f"{stem}-switch"
        names = [self._switch, *(node.namespace for node in self.nodes)]
        # Started before there is anything to remove, in a session of its own: Ctrl-C is not for it.
        self._remover = subprocess.Popen(
            ["sh", "-c", _REMOVE, "sh", str(self.folder), *names], stdin=subprocess.PIPE, start_new_session=True
        )
        self._awake = contextlib.ExitStack()
        try:
            self._awake.enter_context(_cores_awake())
            self._build(names)
        except BaseException:
            self.close()
            raise

    def measure(self, seconds: float = 1.0) -> float:
        """Bytes of payload that a second carries each way between two nodes while both send: the slower way's."""
        first, second = self.nodes[:2]
        ends = first.visit(_stream_socket), second.visit(_stream_socket)
        return line_rate(*ends, first.address, seconds, self.link.bytes_per_s)

    def close(self) -> None:
        """Remove everything. May be called twice.

        Processes that still run in a node keep that node alive, without a wire.
        """
        self._awake.close()
        assert self._remover.stdin is not None
        if not self._remover.stdin.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it ends by itself, later
                self._remover.communicate(b"\n", timeout=_COMMAND_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, names: Sequence[str]) -> None:
        try:
            self.folder.mkdir(mode=0o700)
        except OSError as error:
            raise NoEmulatedNetworkError(f"{self.folder} cannot be made: {error.strerror}") from error
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
        for i, node in enumerate(self.nodes):
            inside, wire, port = node.namespace, node.interface, f"port{i}"
            _run(
                "ip", "link", "add", wire, "netns", inside, "type", "veth", "peer", "name", port, "netns", self._switch
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", inside, "link", "set", "lo", "up")
            _run("ip", "-n", inside, "addr", "add", f"{node.address}/24", "dev", wire)
            _run("ip", "-n", inside, "link", "set", wire, "up")
            # Reno is in every kernel, and where nothing is lost it has nothing to decide.
            _run("ip", "-n", inside, "route", "change", "10.0.0.0/24", "dev", wire, "congctl", "reno")
            node.visit(_keep_speed_when_idle)
            self._limit(inside, wire)
            if len(self.nodes) > 2:  # of two, what one receives is what the other was allowed to send
                self._limit(self._switch, port)

    def _limit(self, namespace: str, interface: str) -> None:
        rate = self.link.bytes_per_s
        if rate is None:
            return
        packet = min(max(int(rate * _PACKET_S), _LEAST_BYTES), _MOST_PACKET_BYTES)
        _run("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(packet))
        burst = packet + max(int(rate * _LATE_S), _LEAST_BYTES)
        limit = max(_QUEUE_BYTES, int(rate * _QUEUE_S))
        tbf = ("tbf", "rate", f"{int(rate * 8)}bit", "burst", str(burst), "limit", str(limit))
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *tbf)


def interface_bytes() -> int:
    """What this process's node has sent, headers included, by the kernel's count.

    Raises:
        RuntimeError: this process is on no emulated node.
    """
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == WIRE:
            return int(counts.split()[8])
    raise RuntimeError("this process is not on an emulated node")


def why_impossible() -> str:
    """Why this process cannot make a network, with what to do; empty when nothing is known to be missing."""
    advice = "run as root on Linux with iproute2 installed, or use a link that is throttled in user space"
    if os.name != "posix" or not hasattr(_LIBC, "setns"):
        return f"network namespaces are Linux's; {advice}"
    if os.geteuid() != 0:
        return f"only root makes network namespaces; {advice}"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; {advice}"
    return ""


def _sweep() -> None:
    """Remove what processes left that were killed together with their remover."""
    for path in _FOLDER.glob("tightwire-*") if _FOLDER.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(NoEmulatedNetworkError):  # another process sweeps at the same time
                _run("ip", "netns", "del", path.name)
    for path in _SOCKETS.glob("tightwire-*"):
        match = _STEM.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoEmulatedNetworkError(f"`{' '.join(command)}` did not end in {_COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise NoEmulatedNetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def _stream_socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)


@contextlib.contextmanager
def _cores_awake() -> Iterator[None]:
    """Idle cores do not sleep: on a virtual machine they wake milliseconds late, and with them the wire's timers.

    Measured on one: an idle machine carried 75 to 93 % of 80 Mbit/s, a busy one 94 %, an idle one that is kept awake 94 %.
    Where the kernel does not offer it, a wire is slower than asked, as measuring it tells.
    """
    try:
        device = os.open("/dev/cpu_dma_latency", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        os.write(device, (0).to_bytes(4, "little"))  # microseconds that waking may take; until it is closed
        yield
    finally:
        os.close(device)


def _keep_speed_when_idle() -> None:
    """A connection that was idle goes on at the rate it had, as between collectives the wire is idle all the time."""
    try:
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    except OSError as error:
        raise NoEmulatedNetworkError(f"/proc/sys cannot be written here: {error}") from error
