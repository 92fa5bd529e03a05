"""What a rank does before it loads: every AllReduce checked, wrong ones out, the result told the same way on all ranks."""

import logging
from dataclasses import replace

import pytest
import torch
from harness import run_in_process
from helpers.comm.fixed_policy import fixed_policy
from msgspec import structs
from torch import Tensor

from tightwire.comm.all_reduce import make
from tightwire.comm.all_reduce.entry import Entry
from tightwire.comm.all_reduce.names import NAMES
from tightwire.comm.all_reduce.one_shot import OneShotAllReduce
from tightwire.comm.codec.codec import Feedback
from tightwire.comm.group.group import Group
from tightwire.comm.policy.rules import Choice, Policy, QuarantinedError, Rule
from tightwire.model.stages import StagePlan
from tightwire.server.ipc.messages import CommChoice, CommSetup, SelfTestVerdict
from tightwire.server.plan.rank_setup import NamedPolicy, RunPlan
from tightwire.server.ranks.rank_comm import check_comm


class BrokenAllReduce(OneShotAllReduce):
    """One-shot that forgets the first rank."""

    name = "broken"

    def __call__(self, x: Tensor, phase: str = "", site: str = "", feedback: Feedback | None = None) -> Tensor:
        return super().__call__(x if self.rank else torch.zeros_like(x), phase, site)


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (NAMES, make.ALL_REDUCE):
        monkeypatch.setitem(table, "broken", Entry(name="broken", make=BrokenAllReduce))


def plan(
    policy: Policy, *extra: NamedPolicy, transport: str = "process-group", library_policy: Policy | None = None
) -> RunPlan:
    return RunPlan(
        device="cpu",
        dtype="float32",
        allreduce="auto",
        transport=transport,
        max_model_len=16,
        num_blocks=1,
        policies=(NamedPolicy("auto", policy, library_policy), *extra),
    )


def _check(group: Group, run_plan: RunPlan) -> tuple[CommSetup, Tensor | None]:
    routes, setup = check_comm(group, run_plan, row_elems=64, max_rows=8)
    if routes is None:
        return setup, None
    return setup, routes.all_reduce("o_proj", 0, "decode")(torch.ones(4), "decode")


def test_auto_goes_on_without_a_wrong_algorithm_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rules = tuple(
        Rule(site, phase, (Choice(None, ("broken", "two-shot"), "fastest"),))
        for site in ("embed", "o_proj", "down_proj")
        for phase in ("prefill", "decode")
    )
    with caplog.at_level(logging.ERROR):
        results = run_in_process(2, _check, plan(Policy(rules)))
    setup, total = results[0]
    assert results[1][0] == setup
    assert total is not None and bool((total == 2).all())
    assert [(v.algorithm, v.ok) for v in setup.self_test] == [("broken", False), ("two-shot", True)]
    assert {choice.algorithm for choice in setup.choices} == {"two-shot"} and len(setup.choices) == 6
    assert "replaces broken, which failed the self-test" in setup.choices[0].reason
    assert "quarantined broken" in caplog.text and caplog.text.count("quarantined") == 1


def test_a_wrong_algorithm_that_was_named_is_refused() -> None:
    with pytest.raises(QuarantinedError, match=r"have no AllReduce left.*broken: rank 0: 256 B: 6\d of 64 sums"):
        run_in_process(2, _check, plan(fixed_policy("broken")))


def test_what_is_sound_is_reported_as_it_was_decided() -> None:
    setup, _ = run_in_process(2, _check, plan(fixed_policy("ring")))[1]
    assert (setup.transport, setup.num_nodes) == ("process-group", 1)
    assert setup.choices[0] == CommChoice("embed", "prefill", None, "ring", "for everything")
    assert setup.self_test == [SelfTestVerdict("ring", True, "checked with 256 B and 2048 B of float32")]


def test_a_single_rank_has_nothing_to_check() -> None:
    ((setup, total),) = run_in_process(1, _check, plan(Policy(())))
    assert total is None and setup.choices == [] and setup.self_test == []


def test_the_check_is_counted_apart_from_the_work() -> None:
    def phases(group: Group) -> set[str]:
        _check(group, plan(fixed_policy("ring")))
        return {count.phase for count in group.ledger.counters.counts()}

    assert run_in_process(2, phases)[0] == {"self-test", "decode"}


def _check_without_peer_memory(group: Group, run_plan: RunPlan) -> CommSetup:
    return _check(replace(group, no_peer_memory="rank 0: the GPUs are strangers"), run_plan)[0]


def test_without_peer_memory_the_policy_for_the_library_is_in_force() -> None:
    here = plan(fixed_policy("flash-int8"), transport="peer-memory", library_policy=fixed_policy("two-shot"))
    setup = run_in_process(2, _check_without_peer_memory, here)[0]
    assert setup.transport == "process-group" and {choice.algorithm for choice in setup.choices} == {"two-shot"}
    assert setup.transport_reason == "no peer memory: rank 0: the GPUs are strangers"


def test_unavailable_peer_memory_is_refused_if_it_was_named() -> None:
    with pytest.raises(ValueError, match="--transport peer-memory is unavailable: rank 0: the GPUs are strangers; use"):
        run_in_process(2, _check_without_peer_memory, plan(fixed_policy("ring"), transport="peer-memory"))


def test_a_hybrid_server_reports_the_policies_of_prompts_that_all_ranks_compute() -> None:
    here = plan(fixed_policy("two-shot"), NamedPolicy("ring", fixed_policy("ring")))
    hybrid = structs.replace(here, stages=StagePlan(((0, 1), (1, 2))))
    setup = run_in_process(2, _check, hybrid)[1][0]
    assert ["auto", *setup.extra] == list(hybrid.policy_names) == ["auto", "ring", "auto/tensor", "ring/tensor"]
    assert setup.extra["auto/tensor"] == setup.choices and setup.extra["ring/tensor"] == setup.extra["ring"]


def test_further_policies_are_checked_and_reported_by_name() -> None:
    int8 = (Choice(None, ("flash-int8",), "policy file mix.json"),)
    mixed = Policy((Rule("o_proj", "prefill", int8, layers=(1, 3)), *fixed_policy("ring").rules))
    here = plan(fixed_policy("two-shot"), NamedPolicy("policy:mix.json", mixed))
    assert here.policy_names == ("auto", "policy:mix.json")

    def check(group: Group) -> tuple[CommSetup, tuple[str, ...], list[str]]:
        routes, setup = check_comm(group, here, row_elems=64, max_rows=8)
        assert routes is not None
        sums = [routes.all_reduce("o_proj", layer, "prefill", arm) for arm in (0, 1) for layer in (0, 1)]
        return setup, routes.policies, [type(all_reduce).__name__ for all_reduce in sums]

    setup, arms, sums = run_in_process(2, check)[1]
    assert arms == here.policy_names
    assert sums == ["TwoShotAllReduce", "TwoShotAllReduce", "RingAllReduce", "FlashAllReduce"]
    assert {choice.algorithm for choice in setup.choices} == {"two-shot"}
    (choices,) = setup.extra.values()
    assert choices[0] == CommChoice("o_proj", "prefill", None, "flash-int8", "policy file mix.json", layers=[1, 3])
    assert [verdict.algorithm for verdict in setup.self_test] == ["two-shot", "flash-int8", "ring"]


def test_a_further_algorithm_that_sums_wrongly_is_refused_by_its_name() -> None:
    here = plan(fixed_policy("ring"), NamedPolicy("broken", fixed_policy("broken")))
    with pytest.raises(QuarantinedError, match=r"--allreduce-extra broken: .* have no AllReduce left"):
        run_in_process(2, _check, here)


def test_without_peer_memory_further_policies_are_those_for_the_library() -> None:
    named = NamedPolicy("flash-int8", fixed_policy("flash-int8"), library_policy=fixed_policy("ring"))
    library = fixed_policy("two-shot")
    here = plan(fixed_policy("flash-int8"), named, transport="peer-memory", library_policy=library)
    setup = run_in_process(2, _check_without_peer_memory, here)[0]
    assert {choice.algorithm for choice in setup.extra["flash-int8"]} == {"ring"}


def test_others_are_awaited_once_everything_is_compiled() -> None:
    def check(group: Group) -> list[int]:
        seen: list[int] = []
        awaited = plan(fixed_policy("ring"))
        check_comm(
            group,
            awaited,
            row_elems=64,
            max_rows=8,
            await_others=lambda: seen.append(len(group.ledger.counters.counts())),
        )
        return seen

    assert run_in_process(2, check) == [[0], [0]]
