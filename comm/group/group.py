"""A group of ranks: one transport, one ledger, one deadline."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CommError, Numbered
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.protocols import Transport
from tightwire.comm.transport.deadline import within
from tightwire.comm.transport.in_process import InProcessTransport, ThreadExchange
from tightwire.comm.transport.peer_access import add_peer_memory, host_identity
from tightwire.comm.transport.process_group import GlooTransport, NcclTransport, ProcessGroupTransport
from tightwire.comm.transport.shared_memory import SharedMemoryTransport
from tightwire.comm.transport.socket_join import SocketOptions, connect_ranks, interface_address, source_address
from tightwire.comm.transport.sockets import SocketTransport
from tightwire.comm.transport.store_notes import FactExchange, FailureNotes

_ELSEWHERE = "192.0.2.1"  # of a documentation network (RFC 5737), to which no packet is sent


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroups:
    """The two subgroups of a rank in a group on several nodes, with the group's ledger and rank numbers from 0.

    Rank r is on node r // L, where L = ``inside.world_size``.
    """

    inside: "Group"  # the ranks of this rank's node, in order
    across: "Group"  # the ranks with this rank's place on each node, in order of the nodes
    notes: FailureNotes | None = None  # notes of the whole group; None when ranks are threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """This rank's membership in a group. One thread runs its collectives; any thread may read ``ledger``."""

    rank: int
    world_size: int
    device: torch.device
    timeout_s: float
    transport: Transport
    ledger: Ledger = field(default_factory=Ledger)
    nodes: NodeGroups | None = None
    no_peer_memory: str = ""  # the reason why requested peer memory is not used

    @property
    def bytes_sent(self) -> int:
        smaller = () if self.nodes is None else (self.nodes.inside, self.nodes.across)
        return self.transport.bytes_sent + sum(group.bytes_sent for group in smaller)

    @contextmanager
    def recorded(
        self,
        op: str,
        algorithm: str,
        num_bytes: int,
        exact_bytes: int | None = None,
        *,
        phase: str = "",
        site: str = "",
    ) -> Iterator[None]:
        """Record the collective that runs in this context, for a tensor of ``num_bytes``, with the bytes it sends.

        ``exact_bytes`` are the bytes that this rank would send unquantized, None for an exact collective. A collective that
        raises stays the ledger's current one.
        """
        sent_before = self.bytes_sent
        self.ledger.begin(op, algorithm, num_bytes, phase, site)
        yield
        self.ledger.end(self.bytes_sent - sent_before, exact_bytes)

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's ``values``, of which all ranks have equally many. Collective."""
        own = torch.tensor(values, dtype=torch.float64).to(self.device)
        return [buf.view(torch.float64).tolist() for buf in self.transport.gather(own.view(torch.uint8))]

    def close(self) -> None:
        """Drop the connections, without waiting for other ranks. May be called twice."""
        self.transport.close()
        if self.nodes is not None:
            self.nodes.inside.close()
            self.nodes.across.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JoinOptions(TypedDict, total=False):
    """Options of ``open_process_group`` that the subgroups of a group are opened with as well."""

    join_timeout_s: float | None
    interface: str | None
    sockets: SocketOptions | None


def open_process_group(
    topology: Topology,
    *,
    store: Store,
    device: torch.device,
    timeout_s: float = 60.0,
    join_timeout_s: float | None = None,
    name: str = "ranks",
    interface: str | None = None,
    segment_fd: int | None = None,
    sockets: SocketOptions | None = None,
    peer_blocks: int = 0,
    ledger: Ledger | None = None,
    numbered: Numbered | None = None,
) -> Group:
    """Join the ``topology.world_size`` processes that open the same ``name`` on the same ``store``.

    CPU tensors travel over gloo (over the loopback interface when all ranks are on one host), CUDA tensors over NCCL.
    Host names are never resolved. Raises CollectiveTimeoutError with the ranks that did not join.

    Args:
        store: serves to join and, after a failure, to find the ranks at fault; keep it alive as long as the group.
        timeout_s: the longest wait in each collective, and by default (``join_timeout_s``) for all ranks to join.
        interface: network interface of gloo and of our sockets, such as ``eth0``; default: GLOO_SOCKET_IFNAME, else the one
            that leads to the store. (NCCL reads NCCL_SOCKET_IFNAME.)
        segment_fd: memory that all ranks share (``comm.transport.segment``), for all but the library's own all-reduce.
        sockets: options of our own sockets (``comm.transport.sockets``) for messages between CPU ranks that share no memory;
            without them messages go over gloo.
        peer_blocks: of kernels that sum CUDA tensors in each other's memory (``comm.transport.peer_access``), if possible; 0: none.
        numbered: converts errors of CPU ranks, whose numbers are those of this group.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device}")
    if device.type != "cpu" and (segment_fd is not None or sockets is not None):
        raise ValueError(f"shared memory and sockets carry CPU tensors, got device {device}")
    if peer_blocks and device.type != "cuda":
        raise ValueError(f"peer memory is between GPUs, got device {device}")
    ledger, rank, world_size = ledger or Ledger(), topology.rank, topology.world_size
    shared: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": device, "timeout_s": timeout_s}
    if world_size == 1:
        return Group(transport=InProcessTransport(ThreadExchange(1), 0, timeout_s=timeout_s), ledger=ledger, **shared)
    store = PrefixStore(f"tightwire/{name}", store)
    join_s = timeout_s if join_timeout_s is None else join_timeout_s
    joining = FactExchange(store, rank=rank, world_size=world_size, timeout_s=join_s, doing="join")
    try:
        own = sockets if segment_fd is None else None
        make = _connect(joining, topology, store, device, timeout_s, interface, own)
    except CommError as error:
        if numbered is None:
            raise
        raise numbered(error) from error
    except RuntimeError as error:
        raise CommError(f"rank {rank} of {world_size} could not connect to the others on {device}: {error}") from error
    notes = FailureNotes(PrefixStore("notes", store), rank, world_size)
    transport = joined = make(notes, ledger=ledger, **shared)
    joined.numbered = numbered or joined.numbered
    joined.barrier()
    if segment_fd is not None:
        transport = SharedMemoryTransport(segment_fd, joined)
    no_peer_memory = add_peer_memory(joined, PrefixStore("peer-memory", store), peer_blocks) if peer_blocks else ""
    return Group(transport=transport, ledger=ledger, no_peer_memory=no_peer_memory, **shared)


def _connect(
    joining: FactExchange,
    topology: Topology,
    store: Store,
    device: torch.device,
    timeout_s: float,
    interface: str | None,
    sockets: SocketOptions | None,
) -> Callable[..., ProcessGroupTransport]:
    """Connect the ranks, and return what makes their transport from the other arguments. Collective."""
    one_host = len(set(joining.share("host", host_identity().encode()))) == 1
    pair_store, join_s = PrefixStore("rendezvous", store), joining.timeout_s
    if device.type == "cuda":
        return partial(NcclTransport, _make_nccl(topology, pair_store, timeout_s))
    address = _gloo_address(store, one_host, interface)
    open_gloo = partial(_make_gloo, topology, pair_store, timeout_s, address)
    if not one_host:  # in another thread, because gloo waits for the kernel's 130 s when a port is blocked
        open_gloo = partial(within, join_s, open_gloo, partial(_gloo_is_late, joining.rank, join_s))
    if sockets is None:
        return partial(GlooTransport, open_gloo())
    host = address.get("hostname") or _address_on(address["interface"], store)
    return partial(SocketTransport, *connect_ranks(joining, host, sockets, join_s), sockets, open_gloo)


def in_process_groups(world_size: int, timeout_s: float = 30.0, ledgers: Sequence[Ledger] | None = None) -> list[Group]:
    """Return one group per rank, all in this process; give each its own thread. Each gets its own of ``ledgers``, or a new one."""
    threads, groups = ThreadExchange(world_size), list[Group]()
    make = partial(Group, world_size=world_size, device=torch.device("cpu"), timeout_s=timeout_s)
    for rank, ledger in enumerate(ledgers or [Ledger() for _ in range(world_size)]):
        transport = InProcessTransport(threads, rank, timeout_s=timeout_s, describe=ledger.current)
        groups.append(make(rank=rank, transport=transport, ledger=ledger))
    return groups


def _gloo_address(store: Store, one_host: bool, interface: str | None) -> dict[str, str]:
    """Return gloo's listen address. Gloo's default resolves the host name, which fails in some containers and laptops."""
    if interface := interface or os.environ.get("GLOO_SOCKET_IFNAME"):
        return {"interface": interface}
    return {"hostname": "127.0.0.1" if one_host else _own_address(store)}


def _make_gloo(topology: Topology, store: Store, timeout_s: float, address: dict[str, str]) -> Any:
    """Make a connected gloo group. Its ports are the kernel's choice: a firewall may block them."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1  # one collective at a time
    with batch_loop_threads():
        # Never lazily connected: to free such a group takes forever if a message for it has arrived and not been received.
        options._devices = [gloo.create_device(**address, lazy_init=False)]
    return gloo(store, topology.rank, topology.world_size, options)


def _gloo_is_late(rank: int, timeout_s: float) -> str:
    return (
        f"rank {rank}: gloo did not connect to all other hosts in {timeout_s:g} s. It listens on ports that the kernel chooses "
        "(sysctl net.ipv4.ip_local_port_range), so open these in the firewall, or do without gloo: --transport sockets, and "
        "another --allreduce than native"
    )


def _make_nccl(topology: Topology, store: Store, timeout_s: float) -> Any:
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise CommError("this torch has no NCCL, which CUDA ranks need; install a CUDA build of torch")
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, topology.rank, topology.world_size, options)


def _own_address(store: Store) -> str:
    """Return the address at which other hosts reach this one: that of the interface towards the store's host."""
    address = source_address(getattr(_root(store), "host", _ELSEWHERE))
    is_local = address.startswith("127.")  # on rank 0 the store may be, with the host name localhost
    return source_address(_ELSEWHERE) if is_local else address


def _address_on(interface: str, store: Store) -> str:
    """Return this host's address on ``interface``: its IPv4 address, unless the store is reached over IPv6."""
    own = _own_address(store) if ":" in getattr(_root(store), "host", "") else ""
    return own if ":" in own else interface_address(interface)


def _root(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


_TASKS = Path("/proc/self/task")


@contextmanager
def batch_loop_threads() -> Iterator[None]:
    """Make socket threads that gloo starts meanwhile batch tasks, which do not preempt the thread that sends (docs/comm.md, "gloo").

    Gloo's loop thread spins while the sending thread holds a connection's lock. If both share a core, it preempts the
    lock holder until the next timer tick: 4 ms at 250 Hz, for messages that take 0.15 to 0.3 ms with batch threads.
    Does nothing on kernels without batch tasks.
    """
    is_possible = hasattr(os, "SCHED_BATCH") and _TASKS.is_dir()
    before = set(os.listdir(_TASKS)) if is_possible else set[str]()
    yield
    # What torch itself starts is named pt_...; with torch 2.11 gloo's threads have no name of their own.
    for task in set(os.listdir(_TASKS)) - before if is_possible else ():
        with contextlib.suppress(OSError):  # the thread has ended, or a sandbox forbids the call: messages are slower
            is_torchs = (_TASKS / task / "comm").read_text().startswith("pt_")
            # Keep an explicit lower priority, such as that of `chrt --idle`.
            if not is_torchs and os.sched_getscheduler(int(task)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task), os.SCHED_BATCH, os.sched_param(0))
