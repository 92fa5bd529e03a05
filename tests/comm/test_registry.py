"""Algorithms by name, and inputs none of them takes."""

import pytest
import torch

from tightwire.comm.group import in_process_groups
from tightwire.comm.registry import ALL_REDUCE, make_all_reduce


def test_an_unknown_name_lists_the_known_ones() -> None:
    [group] = in_process_groups(1)
    with pytest.raises(
        ValueError, match="unknown all-reduce 'rign'; choose one of auto, native, one-shot, ring, two-shot, flash-int8, "
    ):
        make_all_reduce("rign", group)


@pytest.mark.parametrize("name", sorted(ALL_REDUCE))
def test_objects_carry_their_registered_name(name: str) -> None:
    [group] = in_process_groups(1)
    assert make_all_reduce(name, group).name == name


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_refuses_what_it_cannot_sum(dtype: torch.dtype) -> None:
    [group] = in_process_groups(1)
    with pytest.raises(TypeError, match=f"got {dtype}"):
        make_all_reduce("one-shot", group)(torch.zeros(3, dtype=dtype))
