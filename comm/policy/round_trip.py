"""Measures the time that two processes of this host need to sum a small tensor over shared memory."""

import os
from collections.abc import Iterator
from functools import partial

import torch
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.local_ranks import LocalRanks, fd_path
from tightwire.comm.group.topology import Topology
from tightwire.comm.ledger.counters import Latency
from tightwire.comm.transport.segment import make_segment

_WARM_UP_CALLS = 50
_CALLS = 512  # the number of times that a ledger keeps
_NUM_RANKS = 2


def measure_round_trip(num_bytes: int) -> Latency:
    """Quantiles of rank 0's time in a one-shot AllReduce of ``num_bytes`` between two processes: one round.

    Raises:
        LocalRankError: a process died, or could not join the other.
    """
    descriptors = (make_segment(_NUM_RANKS), os.memfd_create("tightwire-store"))
    try:
        # Ranks come from a fork server and inherit no descriptors, but can open them by path.
        segment, store = map(fd_path, descriptors)
        with LocalRanks(_NUM_RANKS, partial(_open_group, segment, store)) as ranks:
            latencies = dict(ranks.stream(_sum_often, num_bytes))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return latencies[0]


def _open_group(segment: str, store: str, rank: int) -> Group:
    segment_fd = os.open(segment, os.O_RDWR)
    try:
        return open_process_group(
            Topology(rank, _NUM_RANKS),
            store=FileStore(store, _NUM_RANKS),
            device=torch.device("cpu"),
            segment_fd=segment_fd,
        )
    finally:
        os.close(segment_fd)


def _sum_often(group: Group, num_bytes: int) -> Iterator[Latency]:
    all_reduce, x_N = make_all_reduce("one-shot", group), torch.ones(num_bytes // 2, dtype=torch.bfloat16)
    for _ in range(_WARM_UP_CALLS):
        all_reduce(x_N)
    group.ledger.counters.forget_latencies()
    for _ in range(_CALLS):
        all_reduce(x_N)
    yield group.ledger.counters.latencies()[0]
