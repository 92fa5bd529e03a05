"""What ``comm.group.local_ranks`` runs in its tests. Importable by rank processes."""

import os
import signal
import time
from collections.abc import Iterator

import torch

from tightwire.comm.group.group import Group
from tightwire.comm.transport.in_process import InProcessTransport, ThreadExchange


def open_nothing(rank: int) -> Group:
    """A group that knows its rank and whose ranks never meet."""
    transport = InProcessTransport(ThreadExchange(8), rank, timeout_s=1.0)
    return Group(rank=rank, world_size=8, device=torch.device("cpu"), timeout_s=1.0, transport=transport)


def refuse_to_open(rank: int) -> Group:
    raise OSError("no wire")


def count_to(group: Group, limit: int) -> Iterator[int]:
    for i in range(limit):
        yield group.rank * 100 + i


def echo(_: Group, word: str, then_sleep_s: float) -> Iterator[str]:
    yield word
    time.sleep(then_sleep_s)


def sleep(_: Group, seconds: float) -> Iterator[str]:
    time.sleep(seconds)
    yield "awake"


def say_and_raise(group: Group, rank: int) -> Iterator[str]:
    yield "hello"
    if group.rank == rank:
        raise KeyError("on purpose")
    time.sleep(30)


def die(group: Group, rank: int) -> Iterator[str]:
    yield "hello"
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
