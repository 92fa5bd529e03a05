"""Measures the rate and latency of a link with the engine's collectives on all ranks at once."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tightwire.comm.group.group import Group
from tightwire.training.ranks.groups import TrainGroups

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20
_TRIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Seconds of an all-gather with ``num_bytes`` per rank, on all ranks at once. ``where``: inside or across nodes."""

    where: str
    num_bytes: int
    others: int  # ranks that each rank sends to
    seconds: float


def probe(world: Group, groups: TrainGroups) -> Iterator[Probed]:
    nodes = groups.main.nodes
    assert nodes is not None
    for where, leg in (("across", nodes.across), ("inside", nodes.inside)):
        for num_bytes in (_SMALL_BYTES, _LARGE_BYTES):
            buf = torch.zeros(num_bytes, dtype=torch.uint8)
            leg.transport.gather(buf)
            seconds = []
            for _ in range(_TRIES):
                world.transport.barrier()
                begun = time.perf_counter()
                leg.transport.gather(buf)
                seconds.append(time.perf_counter() - begun)
            yield Probed(
                where=where, num_bytes=num_bytes, others=leg.world_size - 1, seconds=statistics.median(seconds)
            )
