"""Algorithms run to their end over messages that take nothing, and count nothing."""

from dataclasses import replace

import pytest
import torch

from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import in_process_groups
from tightwire.comm.transport.weightless import WeightlessTransport


@pytest.mark.parametrize("name", ["one-shot", "two-shot", "ring", "flash-int8", "flash:int6-g64,none"])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_all_reduce_adds_this_ranks_own_numbers(name: str, rank: int) -> None:
    group = in_process_groups(3)[rank]
    alone = replace(group, transport=WeightlessTransport(rank, 3), nodes=None)
    total = make_all_reduce(name, alone)(torch.ones(1000))
    assert total.shape == (1000,) and bool(total.isfinite().all()) and alone.bytes_sent == 0
    if name == "one-shot":
        assert torch.equal(total, torch.full((1000,), 3.0))
