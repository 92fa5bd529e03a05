"""What the ranks of ``bench stream`` run in its tests. Importable by rank processes."""

import os
from collections.abc import Iterator

import torch

from tightwire.bench.stream.measure import settle
from tightwire.bench.stream.options import StreamBenchOptions
from tightwire.comm.group.group import Group


def settle_and_look(
    group: Group, options: StreamBenchOptions
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The cores that the rank was given, those that it may run on, and its threads."""
    yield settle(group, options), tuple(sorted(os.sched_getaffinity(0))), torch.get_num_threads()
