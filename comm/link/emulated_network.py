"""Nodes on one machine with a real link between them: network namespaces, veth pairs, the kernel's rate limit.

    with EmulatedNetwork(parse_link("1gbit"), num_nodes=2) as network:
        network.nodes[1].enter()                       # move this thread to the node
        network.measure()                              # the measured bytes per second

Each node is a namespace with one interface; a bridge in its own namespace joins them. Needs root, and ``ip``, ``tc`` and
``unshare``. Latency is not emulated here (many kernels lack netem); ``comm.transport.emulated`` adds it.

A namespace has no name and exists as long as a process is in it. A child process holds each one until this process ends,
however it ends, and then removes the folder for Unix sockets between nodes (abstract sockets are local to a namespace).
"""

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from tightwire.comm.link.link import Link, line_rate

WIRE = "wire0"  # the interface of every node
_SOCKETS = "/run"  # short, because paths of Unix sockets must be
_MAX_NODES = 64
_CLONE_NEWNET = 0x40000000
_COMMAND_TIMEOUT_S = 20.0
_LIBC = ctypes.CDLL(None, use_errno=True)
_T = TypeVar("_T")

# Token bucket: the burst is the part of a message after a pause that the limit does not slow, so it is as small as the rate
# allows. The largest packet before segmentation must fit, so slower links use smaller packets, of at least two Ethernet
# frames. The burst also covers what the rate brings while the kernel's timer is late, which would be lost otherwise.
_PACKET_S = _LATE_S = 0.5e-3
_LEAST_BYTES, _MOST_PACKET_BYTES = 3 << 10, 64 << 10
_QUEUE_BYTES, _QUEUE_S = 4 << 20, 20e-3  # the queue's limit: more than TCP keeps in flight, so that nothing is dropped

# Ends with its standard input, so with the parent.
_HOLD = 'trap "" INT TERM HUP; echo held; read -r _; rm -rf -- "$0"'


class NoEmulatedNetworkError(RuntimeError):
    """Network emulation is not possible on this machine or for this user. The message says why."""


@dataclass(frozen=True, slots=True)
class EmulatedNode:
    """One end of the link. ``interface`` is the one for gloo and NCCL."""

    pid: int  # process that holds the namespace
    address: str
    interface: str = WIRE

    def enter(self) -> None:
        """Move the calling thread to this node permanently; threads and processes it starts later are there too."""
        with open(f"/proc/{self.pid}/ns/net", "rb") as file:
            enter_namespace(file.fileno())

    def visit(self, fn: Callable[[], _T]) -> _T:
        """Run ``fn`` on this node in a new thread and return its result; a socket it makes stays on this node."""

        def run() -> _T:
            self.enter()
            return fn()

        with ThreadPoolExecutor(1) as visitor:
            return visitor.submit(run).result()

    def run(self, *command: str) -> None:
        self.visit(partial(_run, *command))


class EmulatedNetwork:
    """``num_nodes`` nodes that each send and receive at the rate of ``link``, to and from all others together.

    Raises NoEmulatedNetworkError, with nothing left behind, if that is not possible here.
    """

    def __init__(self, link: Link, *, num_nodes: int = 2) -> None:
        if not 2 <= num_nodes <= _MAX_NODES:
            raise ValueError(f"an emulated network has 2 to {_MAX_NODES} nodes, got {num_nodes}")
        if reason := why_impossible():
            raise NoEmulatedNetworkError(reason)
        self.link = link
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=f"tightwire-{os.getpid()}-", dir=_SOCKETS))  # for this user only
        except OSError as error:
            raise NoEmulatedNetworkError(f"no folder can be made in {_SOCKETS}: {error.strerror}") from error
        self._holders: list[subprocess.Popen[bytes]] = []
        self._awake = contextlib.ExitStack()
        try:
            self._awake.enter_context(_cores_awake())
            self._switch = EmulatedNode(self._hold(), "")
            self.nodes = tuple(EmulatedNode(self._hold(), f"10.0.0.{i + 1}") for i in range(num_nodes))
            self._connect()
        except BaseException:
            self.close()
            raise

    def measure(self, seconds: float = 1.0) -> float:
        """Payload bytes per second between two nodes while both send, of the slower direction."""
        first, second = self.nodes[:2]
        ends = first.visit(socket.socket), second.visit(socket.socket)  # of TCP over IPv4
        return line_rate(*ends, first.address, seconds, self.link.bytes_per_s)

    def close(self) -> None:
        """Remove everything; may be called twice. A node with running processes continues to exist, without a link."""
        self._awake.close()
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in self._holders:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends by itself later
                holder.wait(_COMMAND_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hold(self) -> int:
        """Start a process in a new namespace, and in its own session, so that Ctrl-C does not reach it; return its id."""
        command = ["unshare", "--net", "sh", "-c", _HOLD, str(self.folder)]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        with holder.stdout as told:
            line = told.readline().decode().strip()
        if line != "held":
            raise NoEmulatedNetworkError(f"a network namespace cannot be made: {line}")
        return holder.pid

    def _connect(self) -> None:
        self._switch.run("ip", "link", "add", "bridge", "up", "type", "bridge")
        for i, node in enumerate(self.nodes):
            wire, port = node.interface, f"port{i}"
            peer = ("peer", "name", port, "netns", str(self._switch.pid))
            _run("ip", "link", "add", wire, "netns", str(node.pid), "type", "veth", *peer)
            self._switch.run("ip", "link", "set", port, "master", "bridge", "up")
            node.run("ip", "link", "set", "lo", "up")
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", wire)
            node.run("ip", "link", "set", wire, "up")
            # Reno is in every kernel, and without losses the choice of algorithm has no effect.
            node.run("ip", "route", "change", "10.0.0.0/24", "dev", wire, "congctl", "reno")
            node.visit(_keep_speed_when_idle)
            self._limit(node, wire)
            if len(self.nodes) > 2:  # with two nodes, the sender's limit also limits the receiver
                self._limit(self._switch, port)

    def _limit(self, node: EmulatedNode, interface: str) -> None:
        rate = self.link.bytes_per_s
        if rate is None:
            return
        packet = min(max(int(rate * _PACKET_S), _LEAST_BYTES), _MOST_PACKET_BYTES)
        node.run("ip", "link", "set", interface, "gso_max_size", str(packet))
        burst = packet + max(int(rate * _LATE_S), _LEAST_BYTES)
        limit = max(_QUEUE_BYTES, int(rate * _QUEUE_S))
        tbf = ("tbf", "rate", f"{int(rate * 8)}bit", "burst", str(burst), "limit", str(limit))
        node.run("tc", "qdisc", "add", "dev", interface, "root", *tbf)


def enter_namespace(fd: int) -> None:
    """Move the calling thread to the network namespace of an open /proc/PID/ns/net."""
    if _LIBC.setns(fd, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot enter the network namespace: {os.strerror(code)}")


def why_impossible() -> str:
    """Return why this process cannot make a network, with advice; empty if no requirement is known to be missing."""
    advice = "run as root on Linux with iproute2 installed, or use a link that is throttled in user space"
    if os.name != "posix" or not hasattr(_LIBC, "setns"):
        return f"network namespaces are Linux's; {advice}"
    if os.geteuid() != 0:
        return f"only root makes network namespaces; {advice}"
    if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; {advice}"
    return ""


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoEmulatedNetworkError(f"`{' '.join(command)}` did not end in {_COMMAND_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise NoEmulatedNetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def _cores_awake() -> Iterator[None]:
    """Keep idle cores from sleeping, if possible: on a virtual machine they wake milliseconds late."""
    try:
        device = os.open("/dev/cpu_dma_latency", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        os.write(device, (0).to_bytes(4, "little"))  # the longest wake-up in microseconds; valid until closed
        yield
    finally:
        os.close(device)


def _keep_speed_when_idle() -> None:
    """Make an idle connection continue at its previous rate, because the link is often idle between collectives."""
    try:
        Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
    except OSError as error:
        raise NoEmulatedNetworkError(f"/proc/sys cannot be written here: {error}") from error
