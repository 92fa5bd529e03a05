"""A group of ranks: one transport, one ledger, one deadline.

``open_process_group`` joins processes over torch.distributed; ``in_process_groups`` runs ranks as threads, for tests.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.rendezvous import join
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.protocols import Transport
from tightwire.comm.transport.in_process import InProcessTransport, ThreadExchange
from tightwire.comm.transport.peer_access import with_peer_memory
from tightwire.comm.transport.shared_memory import SharedMemoryTransport
from tightwire.comm.transport.store_notes import FailureNotes


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroups:
    """The two subgroups of a rank in a group on several nodes; ``comm.group.nodes`` opens them.

    Ranks are numbered node by node, equally many on each: rank r is on node r // L, where L = ``inside.world_size``.
    Both subgroups record in the whole group's ledger and number their ranks from 0.
    """

    inside: "Group"  # the ranks of this rank's node, in order
    across: "Group"  # the ranks with this rank's place on each node, in order of the nodes
    notes: FailureNotes | None = None  # of the whole group; None when ranks are threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """This rank's membership in a group. One thread runs its collectives; any thread may read ``ledger``.

    ``nodes`` is None when the ranks are on one node or are treated so.
    """

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
        """Payload bytes that this rank has sent to others, including the subgroups of ``nodes``."""
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

        ``exact_bytes``: the bytes that this rank would send unquantized; None: the collective is exact. A collective that
        raises stays the ledger's current one.
        """
        sent_before = self.bytes_sent
        self.ledger.begin(op, algorithm, num_bytes, phase, site)
        yield
        self.ledger.end(self.bytes_sent - sent_before, exact_bytes)

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
    peer_memory: bool = False,
    ledger: Ledger | None = None,
) -> Group:
    """Join the ``topology.world_size`` processes that open the same ``name`` on the same ``store``.

    CPU tensors travel over gloo (over the loopback interface when all ranks are on one host), CUDA tensors over NCCL.
    Host names are never resolved.

    Args:
        store: any torch.distributed store that all ranks reach, such as a TCPStore. It serves to join and, after a
            failure, to find the ranks at fault; keep it alive as long as the group.
        device: this rank's ``cpu`` or ``cuda:N``.
        timeout_s: the longest wait in each collective.
        join_timeout_s: the longest wait for all ranks to join; default: ``timeout_s``.
        name: distinguishes several groups on one store.
        interface: gloo's network interface, such as ``eth0``; default: GLOO_SOCKET_IFNAME, else the one that leads to
            the store. (NCCL reads NCCL_SOCKET_IFNAME.)
        segment_fd: memory that all ranks share (``comm.transport.segment``). CPU tensors then travel through it; only the
            library's own all-reduce uses gloo.
        peer_memory: sum CUDA tensors through each other's memory with this project's kernels
            (``comm.transport.peer_access``); when that is not possible, log the reason and sum with NCCL.
        ledger: where the group's collectives are recorded; default: a new one.
    Raises:
        CollectiveTimeoutError: some ranks did not join in time; names them.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device}")
    if segment_fd is not None and device.type != "cpu":
        raise ValueError(f"shared memory carries CPU tensors, got device {device}")
    if peer_memory and device.type != "cuda":
        raise ValueError(f"peer memory is between GPUs, got device {device}")
    ledger = ledger or Ledger()
    no_peer_memory = ""
    if topology.world_size == 1:
        transport: Transport = InProcessTransport(ThreadExchange(1), 0, timeout_s=timeout_s)
    else:
        transport = join(
            topology,
            store=store,
            device=device,
            timeout_s=timeout_s,
            join_timeout_s=timeout_s if join_timeout_s is None else join_timeout_s,
            name=name,
            interface=interface,
            ledger=ledger,
        )
        if segment_fd is not None:
            transport = SharedMemoryTransport(
                segment_fd,
                rank=topology.rank,
                world_size=topology.world_size,
                library=transport,
                timeout_s=timeout_s,
                ledger=ledger,
            )
        if peer_memory:
            transport, no_peer_memory = with_peer_memory(
                transport,
                PrefixStore(f"tightwire/{name}/peer-memory", store),
                device=device,
                timeout_s=timeout_s,
                describe=ledger.current,
            )
    return Group(
        rank=topology.rank,
        world_size=topology.world_size,
        device=device,
        timeout_s=timeout_s,
        transport=transport,
        ledger=ledger,
        no_peer_memory=no_peer_memory,
    )


def in_process_groups(world_size: int, timeout_s: float = 30.0, ledgers: Sequence[Ledger] | None = None) -> list[Group]:
    """Return one group per rank, all in this process; give each its own thread. ``ledgers``: by rank, default new ones."""
    threads = ThreadExchange(world_size)
    groups = []
    for rank, ledger in enumerate(ledgers or [Ledger() for _ in range(world_size)]):
        transport = InProcessTransport(threads, rank, timeout_s=timeout_s, describe=ledger.current)
        groups.append(
            Group(
                rank=rank,
                world_size=world_size,
                device=torch.device("cpu"),
                timeout_s=timeout_s,
                transport=transport,
                ledger=ledger,
            )
        )
    return groups
