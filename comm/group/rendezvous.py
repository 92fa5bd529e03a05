"""Joins processes: waits for all ranks, finds an address, then makes a gloo or NCCL group."""

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.errors import CollectiveTimeoutError, CommError, name_ranks
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.ledger import Ledger
from tightwire.comm.transport.peer_access import host_identity
from tightwire.comm.transport.process_group import GlooTransport, NcclTransport, ProcessGroupTransport
from tightwire.comm.transport.store_notes import FailureNotes

_LOOPBACK = "127.0.0.1"
# An address of a documentation network (RFC 5737). Connecting a UDP socket to it sends no packet.
_ELSEWHERE = "192.0.2.1"


def join(
    topology: Topology,
    *,
    store: Store,
    device: torch.device,
    timeout_s: float,
    join_timeout_s: float,
    name: str,
    interface: str | None,
    ledger: Ledger,
) -> ProcessGroupTransport:
    """Connect this process to the other ranks; arguments as for ``comm.group.open_process_group``."""
    store = PrefixStore(f"tightwire/{name}", store)
    one_host = _await_ranks(topology, store, join_timeout_s)
    notes = FailureNotes(PrefixStore("notes", store), topology.rank, topology.world_size)
    pair_store = PrefixStore("rendezvous", store)
    try:
        if device.type == "cuda":
            process_group = _make_nccl(topology, pair_store, timeout_s)
        else:
            process_group = _make_gloo(topology, pair_store, timeout_s, _gloo_address(store, one_host, interface))
    except RuntimeError as error:
        raise CommError(
            f"rank {topology.rank} of {topology.world_size} could not connect to the others on {device}: {error}"
        ) from error
    transport_class = NcclTransport if device.type == "cuda" else GlooTransport
    transport = transport_class(
        process_group,
        notes,
        rank=topology.rank,
        world_size=topology.world_size,
        device=device,
        timeout_s=timeout_s,
        ledger=ledger,
    )
    transport.barrier()
    return transport


def _await_ranks(topology: Topology, store: Store, timeout_s: float) -> bool:
    """Wait until all ranks have registered; return whether all are on one host."""
    store.set(f"host/{topology.rank}", host_identity())
    keys = [f"host/{rank}" for rank in range(topology.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        absent = _absent(store, keys)
        raise CollectiveTimeoutError(
            f"rank {topology.rank} waited {timeout_s:g} s for all ranks to join; {name_ranks(absent)} of "
            f"{topology.world_size} did not. Were they started, with the same store and world size?",
            absent,
        ) from error
    return len({bytes(store.get(key)) for key in keys}) == 1


def _absent(store: Store, keys: list[str]) -> set[int]:
    try:
        return {rank for rank, key in enumerate(keys) if not store.check([key])}
    except RuntimeError:
        return set()  # the store is unreachable


def _gloo_address(store: Store, one_host: bool, interface: str | None) -> dict[str, str]:
    """Return gloo's listen address. Gloo's default resolves the host name, which fails in some containers and laptops."""
    interface = interface or os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return {"interface": interface}
    return {"hostname": _LOOPBACK if one_host else _own_address(store)}


def _make_gloo(topology: Topology, store: Store, timeout_s: float, address: dict[str, str]) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1  # one collective at a time
    options._devices = [gloo.create_device(**address)]
    group = gloo(store, topology.rank, topology.world_size, options)
    make_loop_threads_batch()  # after connecting: a thread sets its name only when it first runs
    return group


def _make_nccl(topology: Topology, store: Store, timeout_s: float) -> Any:
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        raise CommError("this torch has no NCCL, which CUDA ranks need; install a CUDA build of torch")
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, topology.rank, topology.world_size, options)


def _own_address(store: Store) -> str:
    """Return the address at which other hosts reach this one: that of the interface towards the store's host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    towards = getattr(store, "host", _ELSEWHERE)
    address = _source_address(towards)
    if address.startswith("127."):
        # On rank 0 the store may be local, with the host name localhost.
        address = _source_address(_ELSEWHERE)
    return address


def _source_address(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return probe.getsockname()[0]


_LOOP = "gloo_tcp_loop"
_TASKS = Path("/proc/self/task")


def make_loop_threads_batch() -> None:
    """Make gloo's socket threads batch tasks, so that they do not preempt the thread that sends.

    For each event on a connection gloo's loop thread tries to take the connection's lock. While the sending thread holds it,
    the loop thread asks the kernel for the same events again, at once. If both share a core, an arriving message wakes the
    loop thread, which preempts the lock holder and spins until the next timer tick: 4 ms at 250 Hz, for messages that take
    0.1 ms. A batch task preempts no other task when it wakes, and is otherwise scheduled normally. Measured with two ranks,
    each bound to one of two cores, exchanging 1 KiB to 288 KiB over loopback: 3.9 ms, with batch threads 0.15 to 0.3 ms.

    Changes all threads that gloo has started so far in this process. Does nothing on kernels without batch tasks.
    """
    if not hasattr(os, "SCHED_BATCH") or not _TASKS.is_dir():
        return
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or a sandbox forbids the call: messages are slower
            number = int(task.name)
            # Keep an explicit lower priority, such as that of `chrt --idle`.
            if (task / "comm").read_text().strip() == _LOOP and os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
