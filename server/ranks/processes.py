"""Starts the rank processes, which one process forks (``worker``), sends them their work, reports their exits, and kills them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Self

import msgspec

import tightwire
from tightwire.comm.group.host import num_cores
from tightwire.comm.link.emulated_network import EmulatedNode
from tightwire.comm.link.wire import Wire
from tightwire.comm.transport.segment import make_segment, why_unusable
from tightwire.kernels.cpu.library import available
from tightwire.parent_death import adopt_orphans, die_with_parent, ignore_terminal_signals
from tightwire.server.hosts.place import HostPlace, listen
from tightwire.server.ipc.channels import make_address
from tightwire.server.plan.rank_setup import RankIdentity, RanksToFork, RankWork

# Not imported here: it imports torch, and the ranks must start before that.
WORKER = (sys.executable, "-m", f"{__package__}.worker")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Ranks:
    """N child processes, killed when the context exits. Construct on the main thread, to which the kernel ties a child."""

    def __init__(
        self,
        world_size: int,
        command: Sequence[str] = WORKER,
        *,
        num_nodes: int = 1,
        num_replicas: int = 1,
        num_stages: int = 1,
        shares_weights: bool = False,
        wire: Wire | None = None,
        place: HostPlace | None = None,
    ) -> None:
        """Start the ranks. Nodes, replicas and stages of a replica are equal runs of ranks, each with shared memory.

        ``shares_weights``: replicas of a node may share layers. ``wire``: between nodes; it must outlive the ranks.
        ``place``: of this host, if there are several; it starts its part of the ranks. ValueError: its store port is taken.
        """
        self.link = None if wire is None else wire.facts
        folder = None if wire is None else wire.folder
        self.to_parent = make_address("parent", folder)
        self.place = place
        per_host = world_size if place is None else world_size // place.num_nodes
        first = 0 if place is None else place.node * per_host
        self.numbers = range(first, first + per_host)  # of the ranks on this host
        self.inboxes = tuple(
            place.inbox(rank) if place and place.node and rank in self.numbers else make_address(f"rank{rank}", folder)
            for rank in range(world_size)
        )
        self.reporters = tuple(make_address(f"reporter{rank}", folder) for rank in self.numbers)
        self._wire = wire
        # Memory shared by all ranks, by those of a node, of a replica or stage, and by those of a node that hold the same weights.
        num_parts = num_replicas if num_replicas > 1 else num_stages
        tp, per_node = world_size // num_parts, num_replicas // num_nodes
        sizes = {
            "segment_fd": world_size if place is None else 1,
            "node_segment_fd": world_size // num_nodes if num_nodes > 1 else 1,
            "replica_segment_fd": tp if num_parts > 1 else 1,
            "peer_segment_fd": per_node if shares_weights else 1,
        }
        if why_unusable() is not None:
            sizes = {}
        segments: dict[tuple[str, int], int] = {}
        identities: list[RankIdentity] = []
        # The store's socket listens before any rank runs, so that no rank connects too early or finds the port taken.
        with self._open_store() as listener:
            works = [os.pipe() for _ in self.numbers]
            self._works = [os.fdopen(write, "wb") for _, write in works]
            told_fd, ids_fd = os.pipe()
            for rank, (work_fd, _) in zip(self.numbers, works, strict=True):
                node = rank * num_nodes // world_size
                parts = (0, node, rank // tp, node * tp + rank % tp)
                fds = {"work_fd": work_fd}
                for (kind, size), part in zip(sizes.items(), parts, strict=False):
                    if size > 1:
                        if (kind, part) not in segments:
                            segments[kind, part] = make_segment(size)
                        fds[kind] = segments[kind, part]
                identities.append(self._identity(rank, listener, fds))
            adopt_orphans(True)
            given = set[int]().union(*(each.fds for each in identities))
            self._fork_server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                env=_environment(per_host, "" if place is None else place.interface),
                pass_fds=(ids_fd, *given),
                preexec_fn=_begin,  # noqa: PLW1509 - a few system calls, and no other thread runs yet
            )
        for fd in (ids_fd, *segments.values(), *(read for read, _ in works)):
            os.close(fd)  # the ranks hold their own copies
        # The process ids of this host's ranks, by rank; as long as a rank is not forked, that of the process that forks it.
        self.pids = dict.fromkeys(self.numbers, self._fork_server.pid)
        self._exits: dict[int, Future[int]] = {rank: Future() for rank in self.numbers}
        self._killed = False
        assert self._fork_server.stdin is not None, "a pipe was asked for"
        with self._fork_server.stdin as pipe:
            _tell(pipe, RanksToFork(tuple(identities), ids_fd))
        threading.Thread(target=self._collect, args=(told_fd,), daemon=True).start()

    def _collect(self, told_fd: int) -> None:
        """Take the ranks over from the process that forks them, and wait for each."""
        with open(told_fd, "rb") as told:
            forked = dict(zip(self.numbers, map(int, told), strict=False))
        code = self._fork_server.wait()  # from now on they are children of this process
        adopt_orphans(False)
        self.pids.update(forked)
        for rank in self.numbers:
            if rank not in forked:
                self._exits[rank].set_result(code)
            else:
                threading.Thread(target=self._await_exit, args=(rank,), daemon=True).start()
        if self._killed:
            self.begin_kill()

    def _await_exit(self, rank: int) -> None:
        self._exits[rank].set_result(os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _node(self, rank: int) -> EmulatedNode | None:
        """The node a rank runs on; None: this process's."""
        nodes = self._wire.nodes if self._wire else ()
        return nodes[rank * len(nodes) // len(self.inboxes)] if nodes else None

    def _open_store(self) -> socket.socket:
        """The store's socket, on rank 0's node."""
        node, backlog = self._node(0), max(64, len(self.inboxes))
        if self.place is not None:
            return listen(self.place.master, self.place.store_port) if self.place.node == 0 else socket.socket()
        if node is None:
            return socket.create_server(("127.0.0.1", 0), backlog=backlog)
        return node.visit(lambda: socket.create_server((node.address, 0), backlog=backlog))

    def _identity(self, rank: int, listener: socket.socket, fds: Mapping[str, int]) -> RankIdentity:
        """``fds``: those of shared memory and of the work, by field name."""
        place, local_rank = self.place, rank - self.numbers.start
        host, port = listener.getsockname()[:2] if place is None else (place.master, place.store_port)
        return RankIdentity(
            rank=rank,
            world_size=len(self.inboxes),
            parent_pid=os.getpid(),
            to_parent=self.to_parent,
            inboxes=self.inboxes,
            reporter=self.reporters[local_rank],
            local_rank=local_rank,
            num_local=len(self.numbers),
            store_host=host,
            store_port=port,
            store_fd=listener.fileno() if rank == 0 else None,
            socket_port=0 if place is None else place.sum_port(rank),
            node=self._node(rank),
            throttle=None if self._wire is None else self._wire.throttle,
            **fds,
        )

    def hand_out(self, work: RankWork) -> None:
        """Send every rank its work. A rank that has died is noticed by its exit, not here."""
        for pipe in self._works:
            _tell(pipe, work)

    def on_exit(self, loop: asyncio.AbstractEventLoop, callback: Callable[[int, int], None]) -> None:
        """Call ``callback(rank, exit code)`` on ``loop`` as soon as a process ends; negative codes are signals."""

        def tell(rank: int, end: Future[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(callback, rank, end.result())

        for rank, end in self._exits.items():
            end.add_done_callback(partial(tell, rank))

    def begin_kill(self) -> None:
        """Send SIGKILL to all ranks, stopped ones too."""
        self._killed = True
        self._fork_server.kill()
        for rank, end in self._exits.items():
            if self.pids[rank] != self._fork_server.pid and not end.done():
                with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                    os.kill(self.pids[rank], signal.SIGKILL)

    def kill(self) -> None:
        """Kill all ranks and reap them, which takes seconds on a busy machine."""
        self.begin_kill()
        # A process in an uninterruptible read from a dead file server cannot be reaped; the kernel ends it later.
        futures.wait(self._exits.values(), timeout=5)
        for pipe in self._works:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    async def wait(self, timeout_s: float) -> bool:
        """Whether all ranks exit on their own within ``timeout_s``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not all(end.done() for end in self._exits.values()):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True


def _tell(pipe: IO[bytes], message: msgspec.Struct) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.write(msgspec.json.encode(message) + b"\n")
        pipe.flush()


def _begin() -> None:
    """Runs in the child before its program starts."""
    die_with_parent()
    ignore_terminal_signals()


def _environment(num_local: int, interface: str) -> dict[str, str]:
    """The parent's environment, with the CPU threads divided over the ranks before their libraries start any.

    ``interface``: towards the other hosts, for gloo and NCCL; empty: not set.
    """
    threads = str(max(1, num_cores() // num_local))
    source = str(Path(tightwire.__file__).parent.parent)
    return {
        **dict.fromkeys(_THREAD_VARIABLES, threads),
        # Of the store: the C++ stack when rank 0 has ended before a rank asks who failed, and clients' names without DNS.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OPENBLAS_NUM_THREADS": "1",  # NumPy would start threads when it is imported, which no forked rank has
        "GOMP_SPINCOUNT": "40000",  # 2 ms, not 16, of threads without work, which keep ranks from cores that drafts used
        **os.environ,
        # Ranks run the parent's own code, even if it is not installed.
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")])),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the device order of the memory budget
        "PYTHONUNBUFFERED": "1",
        # `why_unusable` has loaded them here, and said why if it cannot: ranks neither try to build them again nor repeat it.
        **({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}),
        **({} if num_local == 1 or available() else {"TIGHTWIRE_KERNELS": "spec"}),
    }
