"""Functions that the ranks of ``bench stream`` run in its tests."""

import os
from collections.abc import Iterator

import torch

from tightwire.bench.stream.measure import bind_rank
from tightwire.bench.stream.options import StreamOptions
from tightwire.comm.group.group import Group


def bind_and_look(group: Group, options: StreamOptions) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The cores that the rank got, those that it may run on, and its number of threads."""
    yield bind_rank(group, options), tuple(sorted(os.sched_getaffinity(0))), torch.get_num_threads()
