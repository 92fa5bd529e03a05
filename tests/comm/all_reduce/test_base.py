"""What all AllReduces have in common beyond the contract suite: no gradients."""

import pytest
import torch
from harness import run_in_process

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.all_reduce.names import all_reduce_names
from tightwire.comm.group.group import Group


def _sum_of_parameters(group: Group, name: str) -> bool:
    result = make_all_reduce(name, group)(torch.nn.Parameter(torch.ones(5, 3)))
    assert result.eq(group.world_size).all()
    return result.requires_grad


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", all_reduce_names())
def test_a_result_is_no_part_of_an_autograd_graph(name: str, world_size: int) -> None:
    assert run_in_process(world_size, _sum_of_parameters, name) == [False] * world_size
