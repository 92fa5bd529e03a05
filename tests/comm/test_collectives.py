"""all_gather: any dtype and shape, over processes and threads."""

from collections.abc import Callable

import pytest
import torch
from harness import run_in_process, run_ranks

from tightwire.comm.collectives import all_gather
from tightwire.comm.group import Group


def _gather_each_kind(group: Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for shape in ((), (1,), (3, 5), (0, 4)):
            whole = torch.randint(0, 2, (group.world_size, *shape), generator=torch.Generator().manual_seed(1)).to(
                dtype
            )
            received = all_gather(group, whole[group.rank])
            assert len(received) == group.world_size
            assert all(torch.equal(got, want) for got, want in zip(received, whole, strict=True)), (dtype, shape)


def _gather_transposed(group: Group) -> None:
    x = torch.arange(6.0).view(2, 3).t() + group.rank
    received = all_gather(group, x)
    assert all(torch.equal(got, x - group.rank + rank) for rank, got in enumerate(received))


def _gather_counts(group: Group) -> None:
    all_gather(group, torch.zeros(10))
    [count] = group.ledger.counts()
    assert count[:5] == ("all_gather", "direct", "", 1, 40 * (group.world_size - 1))


@pytest.mark.parametrize("run", [run_ranks, run_in_process])
@pytest.mark.parametrize("world_size", [1, 3])
def test_gathers_in_rank_order(run: Callable, world_size: int) -> None:
    run(world_size, _gather_each_kind)
    run(world_size, _gather_transposed)


@pytest.mark.parametrize("run", [run_ranks, run_in_process])
def test_counts_what_it_sends(run: Callable) -> None:
    run(3, _gather_counts)
