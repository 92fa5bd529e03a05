"""What the ranks of ``bench stream`` run in its tests. Importable by rank processes."""

import os
from collections.abc import Iterator

import torch

from tightwire.comm.group import Group
from tightwire.server.bench.stream.measure import settle
from tightwire.server.bench.stream.options import StreamBenchOptions


def settle_and_look(
    group: Group, options: StreamBenchOptions
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The cores that the rank was given, those that it may run on, and its threads."""
    yield settle(group, options), tuple(sorted(os.sched_getaffinity(0))), torch.get_num_threads()
