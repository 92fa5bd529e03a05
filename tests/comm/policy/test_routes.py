"""Policies become AllReduces: sizes choose, equal choices share an object, the sum is right; which sums a kernel can make."""

from typing import Any

import pytest
import torch
from harness import run_in_process, run_ranks, with_throttle
from helpers.comm.fixed_policy import fixed_policy, make_arms, make_routes

from tightwire.comm.all_reduce.make import make_all_reduce
from tightwire.comm.group.group import Group, in_process_groups
from tightwire.comm.policy.routes import SizedAllReduce, auto_all_reduce, kernel_sums
from tightwire.comm.policy.rules import Choice, Policy, Rule


def rule(site: str, phase: str, *table: tuple[int | None, str], reason: str = "") -> Rule:
    return Rule(site, phase, tuple(Choice(limit, (name, "ring"), reason) for limit, name in table))


def test_equal_choices_share_an_object_whatever_their_reasons() -> None:
    bands = ((64, "one-shot"), (None, "two-shot"))
    policy = Policy(
        (
            rule("o_proj", "prefill", *bands, reason="measured"),
            rule("o_proj", "decode", *bands, reason="not asked"),
            rule("down_proj", "prefill", (None, "one-shot")),
        )
    )
    routes = make_routes(policy, in_process_groups(1)[0])
    assert routes.all_reduce("o_proj", 0, "prefill") is routes.all_reduce("o_proj", 9, "decode")
    assert routes.all_reduce("o_proj", 0, "prefill") is not routes.all_reduce("down_proj", 0, "prefill")


def test_arms_have_objects_of_their_own_and_share_those_of_like_choices() -> None:
    both = fixed_policy("one-shot").rules[:4] + fixed_policy("ring").rules[4:]
    arms = {"one": fixed_policy("one-shot"), "other": fixed_policy("ring"), "both": Policy(both)}
    routes = make_arms(arms, in_process_groups(1)[0])
    assert routes.policies == ("one", "other", "both")
    names = [type(routes.all_reduce("o_proj", 0, "prefill", arm)).__name__ for arm in range(3)]
    assert names == ["OneShotAllReduce", "RingAllReduce", "OneShotAllReduce"]
    assert routes.all_reduce("o_proj", 0, "prefill", 2) is routes.all_reduce("embed", 0, "decode", 0)
    assert routes.all_reduce("down_proj", 1, "decode", 2) is routes.all_reduce("o_proj", 0, "decode", 1)


def test_one_algorithm_for_all_sizes_is_that_algorithm_itself() -> None:
    routes = make_routes(fixed_policy("two-shot"), in_process_groups(1)[0])
    assert type(routes.all_reduce("o_proj", 0, "decode")).__name__ == "TwoShotAllReduce"


def _names_and_sums(group: Group) -> list[tuple[str, float]]:
    policy = Policy((rule("o_proj", "prefill", (16, "one-shot"), (64, "two-shot"), (None, "ring")),))
    all_reduce = make_routes(policy, group).all_reduce("o_proj", 0, "prefill")
    seen = []
    for num_elems in (4, 5, 16, 17):
        result = all_reduce(torch.full((num_elems,), float(group.rank + 1)))
        assert bool((result == 3).all())
        last = group.ledger.last()
        assert last is not None
        seen.append((str(last), float(all_reduce.wire_bytes(num_elems, 4))))
    return seen


def test_a_message_goes_by_its_size_and_is_counted_under_the_name_that_ran() -> None:
    for seen in run_in_process(2, _names_and_sums):
        ran = [text.split()[1] for text, _ in seen]
        assert ran == ["one-shot", "two-shot", "two-shot", "ring"]


def test_bytes_exactness_and_bound_are_those_of_the_algorithm_for_the_size() -> None:
    group = in_process_groups(3)[0]
    small, large = make_all_reduce("one-shot", group), make_all_reduce("flash-int4", group)
    sized = SizedAllReduce([(64, small), (None, large)])
    assert sized.wire_bytes(16, 4) == small.wire_bytes(16, 4)
    assert sized.wire_bytes(1000, 4) == large.wire_bytes(1000, 4)
    assert not sized.lossless and SizedAllReduce([(64, small), (None, small)]).lossless
    inputs = [torch.ones(16)] * 3
    assert torch.equal(sized.max_error(inputs), small.max_error(inputs))


@pytest.mark.parametrize("limits", [[], [64], [None, None], [64, 32, None], [64, 64, None]])
def test_limits_must_rise_and_end_open(limits: list[int | None]) -> None:
    one_shot = make_all_reduce("one-shot", in_process_groups(1)[0])
    with pytest.raises(ValueError, match=r"limits must rise|messages of any size"):
        SizedAllReduce([(limit, one_shot) for limit in limits])


_NAMES = ("one-shot", "two-shot", "ring", "native", "flash-int8", "flash:none,none")


def _in_kernels(group: Group) -> list[str]:
    return [name for name in _NAMES if kernel_sums(make_all_reduce(name, group), 8, 4) is not None]


def _in_kernels_by_size(group: Group) -> list[Any]:
    one_shot, two_shot = make_all_reduce("one-shot", group), make_all_reduce("two-shot", group)
    sized = SizedAllReduce([(64, one_shot), (None, two_shot)])
    nested = SizedAllReduce([(128, sized), (None, make_all_reduce("one-shot", group))])
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
    seen = run_ranks(2, _in_kernels_by_size, shared_memory=True)
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


class _Fused:
    """Stands for a transport's kernels, which are not called here."""

    one_shot = in_kernel = None
    tells_coding = True

    def flash(self) -> None: ...


def _auto_names(world_size: int, *, fused: bool) -> list[str]:
    """The algorithms that ``auto`` uses, by rising size."""
    group = in_process_groups(world_size)[0]
    kernels: Any = _Fused() if fused else None
    group.transport.fused = kernels
    auto = auto_all_reduce(group)
    assert isinstance(auto, SizedAllReduce) and auto.name == "auto" and auto.lossless
    return list(dict.fromkeys(auto.choose(1 << power).name for power in range(10, 27)))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("world_size", [3, 8])
def test_auto_is_one_shot_for_small_messages_and_two_shot_for_large_ones(world_size: int, fused: bool) -> None:
    assert _auto_names(world_size, fused=fused) == ["one-shot", "two-shot"]


def test_auto_over_two_ranks_in_shared_memory_is_one_shot_at_any_size() -> None:
    assert _auto_names(2, fused=True) == ["one-shot"]
