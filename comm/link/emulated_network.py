"""Nodes on one machine with a real link between them: network namespaces, veth pairs, the kernel's rate limit.

    with EmulatedNetwork(parse_link("1gbit"), num_nodes=2) as network:
        network.nodes[1].command(["sleep", "1"])       # the command line of a program on that node
        network.nodes[1].enter()                       # or: move this thread there
        network.measure()                              # the measured bytes per second

Each node is a namespace with one interface; a bridge in its own namespace joins them. Needs root, and ``ip`` and ``tc``
of iproute2. Latency is not emulated here (many kernels lack netem); ``comm.transport.emulated`` adds it.

Namespaces are named after the process that made them, and so is a folder for Unix sockets between nodes (abstract
sockets are local to a namespace). The end of the context removes them; if the process dies first, a child process does.
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from tightwire.comm.link.link import Link, line_rate

WIRE = "wire0"  # the interface of every node
_FOLDER = Path("/run/netns")  # the folder of iproute2's namespaces
_SOCKETS = Path("/run")  # short, because paths of Unix sockets must be; iproute2 needs it too
_NAME = re.compile(r"tightwire-(\d+)-[0-9a-f]{4}-(?:\d+|switch)")
_STEM = re.compile(r"tightwire-(\d+)-[0-9a-f]{4}")
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

# Starts when told to, or when its standard input ends because the parent has died. In that case it waits, because a command
# that the parent started may still be making a namespace.
_REMOVE = (
    'trap "" INT TERM HUP; read -r _ || sleep 0.5; folder=$1; shift; '
    'for name; do ip netns del "$name" 2>/dev/null; done; rm -rf -- "$folder"; exit 0'
)


class NoEmulatedNetworkError(RuntimeError):
    """Network emulation is not possible on this machine or for this user. The message says why."""


@dataclass(frozen=True, slots=True)
class EmulatedNode:
    """One end of the link. ``interface`` is the one for gloo and NCCL."""

    namespace: str
    address: str
    interface: str = WIRE

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return a command line that runs ``argv`` on this node."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def enter(self) -> None:
        """Move the calling thread to this node permanently; threads and processes it starts later are there too."""
        with open(_FOLDER / self.namespace, "rb") as file:
            if _LIBC.setns(file.fileno(), _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot enter the namespace {self.namespace}: {os.strerror(code)}")

    def visit(self, fn: Callable[[], _T]) -> _T:
        """Run ``fn`` on this node in a new thread and return its result; a socket it makes stays on this node."""

        def run() -> _T:
            self.enter()
            return fn()

        with ThreadPoolExecutor(1) as visitor:
            return visitor.submit(run).result()


class EmulatedNetwork:
    """``num_nodes`` nodes that each send and receive at the rate of ``link``, to and from all others together.

    Raises NoEmulatedNetworkError, with nothing left behind, if that is not possible here.
    """

    def __init__(self, link: Link, *, num_nodes: int = 2) -> None:
        if not 2 <= num_nodes <= _MAX_NODES:
            raise ValueError(f"an emulated network has 2 to {_MAX_NODES} nodes, got {num_nodes}")
        if reason := why_impossible():
            raise NoEmulatedNetworkError(reason)
        _sweep()
        self.link = link
        stem = f"tightwire-{os.getpid()}-{secrets.token_hex(2)}"
        self.folder = _SOCKETS / stem  # accessible to this user only
        self.nodes = tuple(EmulatedNode(f"{stem}-{i}", f"10.0.0.{i + 1}") for i in range(num_nodes))
        self._switch = f"{stem}-switch"
        names = [self._switch, *(node.namespace for node in self.nodes)]
        # Started before there is anything to remove, in its own session, so that Ctrl-C does not reach it.
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
        """Payload bytes per second between two nodes while both send, of the slower direction."""
        first, second = self.nodes[:2]
        ends = first.visit(_stream_socket), second.visit(_stream_socket)
        return line_rate(*ends, first.address, seconds, self.link.bytes_per_s)

    def close(self) -> None:
        """Remove everything; may be called twice. A node with running processes continues to exist, without a link."""
        self._awake.close()
        assert self._remover.stdin is not None
        if not self._remover.stdin.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the remover ends by itself later
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
            # Reno is in every kernel, and without losses the choice of algorithm has no effect.
            _run("ip", "-n", inside, "route", "change", "10.0.0.0/24", "dev", wire, "congctl", "reno")
            node.visit(_keep_speed_when_idle)
            self._limit(inside, wire)
            if len(self.nodes) > 2:  # with two nodes, the sender's limit also limits the receiver
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


def why_impossible() -> str:
    """Return why this process cannot make a network, with advice; empty if no requirement is known to be missing."""
    advice = "run as root on Linux with iproute2 installed, or use a link that is throttled in user space"
    if os.name != "posix" or not hasattr(_LIBC, "setns"):
        return f"network namespaces are Linux's; {advice}"
    if os.geteuid() != 0:
        return f"only root makes network namespaces; {advice}"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; {advice}"
    return ""


def _sweep() -> None:
    """Remove namespaces and folders of processes that were killed together with their remover."""
    for path in _FOLDER.glob("tightwire-*") if _FOLDER.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(NoEmulatedNetworkError):  # another process may remove it at the same time
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
