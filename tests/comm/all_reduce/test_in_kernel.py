"""Which sums a caller's kernel can make by itself: one-shots over shared memory, and nothing else."""

from typing import Any

import pytest
from harness import run_in_process, run_ranks, with_throttle

from tightwire.comm.all_reduce.by_size import by_size
from tightwire.comm.all_reduce.in_kernel import kernel_sums
from tightwire.comm.all_reduce.registry import make_all_reduce
from tightwire.comm.group.group import Group

_NAMES = ("one-shot", "two-shot", "ring", "native", "flash-int8", "flash:none,none")


def _in_kernels(group: Group) -> list[str]:
    return [name for name in _NAMES if kernel_sums(make_all_reduce(name, group), 8, 4) is not None]


def _by_size(group: Group) -> list[Any]:
    one_shot, two_shot = make_all_reduce("one-shot", group), make_all_reduce("two-shot", group)
    sized = by_size([(64, one_shot), (None, two_shot)])
    nested = by_size([(128, sized), (None, make_all_reduce("one-shot", group))])
    found = [
        [kernel_sums(all_reduce, num_elems, 4) for num_elems in (16, 17, 33)]
        for all_reduce in (sized, nested, one_shot)
    ]
    of_the_group = found[2][0]
    assert of_the_group is not None
    return [[sums is of_the_group for sums in row] for row in found]


def test_one_shots_over_shared_memory() -> None:
    assert run_ranks(2, _in_kernels, shared_memory=True) == [["one-shot"]] * 2


def test_the_size_decides_where_it_decides_the_algorithm() -> None:
    seen = run_ranks(2, _by_size, shared_memory=True)
    assert seen == [[[True, False, False], [True, False, True], [True] * 3]] * 2


@pytest.mark.parametrize("over", ["gloo", "in-process", "throttled"])
def test_no_other_transport(over: str) -> None:
    if over == "in-process":
        seen = run_in_process(2, _in_kernels)
    elif over == "gloo":
        seen = run_ranks(2, _in_kernels)
    else:
        seen = run_ranks(2, with_throttle, "40gbit,latency=2us", _in_kernels, shared_memory=True)
    assert seen == [[], []]
