"""How long two processes of this host take to sum a small tensor over shared memory, measured on the spot.

Starts the second process itself, so whoever calls this must be importable (``if __name__ == "__main__"``).
"""

import multiprocessing
import os
from multiprocessing.connection import Connection

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group import Group, open_process_group
from tightwire.comm.ledger import Latency
from tightwire.comm.registry import make_all_reduce
from tightwire.comm.segment import make_segment
from tightwire.comm.topology import Topology

_WARM_UP_CALLS = 50
_CALLS = 512  # as many as a ledger keeps times of
_JOIN_S = 60.0


def measure_round_trip(num_bytes: int) -> Latency:
    """Quantiles of rank 0's time in a one-shot AllReduce of ``num_bytes`` between two processes: one round of waiting.

    Raises:
        CommError: the other process was lost or did not come.
    """
    segment_fd = make_segment(2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = f"/proc/{os.getpid()}/fd/{segment_fd}"  # a spawned process inherits no descriptors
    other = context.Process(target=_other, args=(path, store.port, num_bytes, theirs), daemon=True)
    other.start()
    try:
        with _open_group(0, store, segment_fd) as group:
            _sum_often(group, num_bytes)
            ours.poll(_JOIN_S)  # a rank that leaves first would fail the other's last call
            return group.ledger.latencies()[0]
    finally:
        other.kill()
        other.join()
        os.close(segment_fd)


def _other(path: str, port: int, num_bytes: int, done: Connection) -> None:
    segment_fd = os.open(path, os.O_RDWR)
    with _open_group(1, TCPStore("127.0.0.1", port, is_master=False), segment_fd) as group:
        _sum_often(group, num_bytes)
        done.send(None)
        done.poll(_JOIN_S)  # until rank 0 has its result and ends this process


def _open_group(rank: int, store: TCPStore, segment_fd: int) -> Group:
    device = torch.device("cpu")
    return open_process_group(Topology(rank, 2), store=store, device=device, timeout_s=_JOIN_S, segment_fd=segment_fd)


def _sum_often(group: Group, num_bytes: int) -> None:
    torch.set_num_threads(1)
    all_reduce, x_N = make_all_reduce("one-shot", group), torch.ones(num_bytes // 2, dtype=torch.bfloat16)
    for _ in range(_WARM_UP_CALLS):
        all_reduce(x_N)
    group.ledger.forget_latencies()
    for _ in range(_CALLS):
        all_reduce(x_N)
