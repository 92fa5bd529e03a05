"""The ranks of ``bench stream``: processes of this machine; one alone needs no group to join."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.bench.comm.ranks import RankOptions, open_ranks
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.local_ranks import LocalRanks, silence_after
from tightwire.comm.group.topology import Topology


@contextmanager
def open_stream_ranks(num_ranks: int, device: str, timeout_s: float) -> Iterator[tuple[LocalRanks, str]]:
    """The running ranks, and what carries their messages.

    Raises:
        ValueError: what was asked cannot be had on this machine; says why.
        LocalRankError: the ranks could not join.
    """
    if num_ranks > 1:
        options = RankOptions(ranks=num_ranks, device=device, timeout_s=timeout_s)
        with open_ranks(options) as (ranks, facts):
            yield ranks, facts["transport"]
        return
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here")
    with LocalRanks(1, partial(_alone, device), silence_s=silence_after(timeout_s)) as ranks:
        yield ranks, "none"


def _alone(device: str, rank: int) -> Group:
    own = torch.device(device, rank) if device == "cuda" else torch.device(device)
    return open_process_group(Topology(rank, 1), store=HashStore(), device=own)
