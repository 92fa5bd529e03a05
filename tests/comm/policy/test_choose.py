"""What ``auto`` comes to, and why: exact unless allowed, one order of summing in a phase, measurements over seeds."""

from typing import Any

import pytest

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.all_reduce.make import parse_all_reduce
from tightwire.comm.policy.accuracy import Accuracy, Loss
from tightwire.comm.policy.choose import Chooser, PolicyRequest, Verdict
from tightwire.comm.policy.cost import CostModel, size_grid
from tightwire.comm.policy.error_budget import ErrorBudget
from tightwire.comm.policy.rules import PHASES, SITES, QuarantinedError

ROW = 576  # not a multiple of 128


def chooser(
    world_size: int = 2,
    *,
    transport: str = "shared-memory",
    device: str = "cpu",
    num_nodes: int = 1,
    points: dict[str, list[tuple[int, float]]] | None = None,
    wrong: dict[str, str] | None = None,
    row_elems: int = ROW,
    **asked: Any,
) -> Chooser:
    setting = Setting(transport=transport, device=device, world_size=world_size, num_nodes=num_nodes, dtype="bfloat16")
    request = PolicyRequest(row_elems=row_elems, max_rows=512, max_decode_rows=64, **asked)
    return Chooser(request, CostModel(setting, points), wrong)


def first(made: Chooser, site: str, phase: str) -> list[str]:
    return [choice.algorithms[0] for choice in made.policy().choices(site, 0, phase)]


def lossless(names: list[str]) -> bool:
    return all(parse_all_reduce(name).lossless for name in names)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("transport", ["shared-memory", "process-group"])
def test_auto_is_lossless_everywhere(world_size: int, transport: str) -> None:
    assert lossless(list(chooser(world_size, transport=transport).policy().algorithms))


def test_auto_switches_by_size_and_the_same_for_both_phases() -> None:
    made = chooser(4)
    assert first(made, "o_proj", "prefill") == ["one-shot", "two-shot"]
    assert made.policy().choices("o_proj", 0, "prefill") == made.policy().choices("o_proj", 0, "decode")


@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_on_a_cpu_auto_uses_no_sum_that_depends_on_an_elements_place(world_size: int) -> None:
    assert set(chooser(world_size).policy().algorithms) == {"one-shot", "two-shot"}


def test_with_two_ranks_every_lossless_sum_is_the_same_and_may_stand_in() -> None:
    assert set(chooser(2).policy().algorithms) == {"one-shot", "two-shot", "ring", "native"}


def test_a_lossy_name_is_for_prompt_rows_of_the_layers_only() -> None:
    made = chooser(allreduce="flash-int4")
    for site in SITES:
        for phase in PHASES:
            asked = site != "embed" and phase == "prefill"
            assert (first(made, site, phase) == ["flash-int4"]) == asked
            assert asked or lossless(first(made, site, phase))
    (choice,) = made.policy().choices("o_proj", 0, "decode")
    assert "decode rows stay exact" in choice.reason


def test_a_lossless_name_is_for_everything() -> None:
    made = chooser(3, allreduce="ring")
    assert all(first(made, site, phase) == ["ring"] for site in SITES for phase in PHASES)


def test_the_flag_for_decode_rows_overrules() -> None:
    made = chooser(allreduce="two-shot", decode="ring")
    assert first(made, "o_proj", "prefill") == ["two-shot"]
    assert first(made, "o_proj", "decode") == first(made, "down_proj", "decode") == ["ring"]
    assert first(made, "embed", "prefill") == first(made, "embed", "decode") == ["two-shot"]


def test_generated_rows_may_be_quantized_when_asked() -> None:
    assert first(chooser(decode="flash-int8"), "o_proj", "decode") == ["flash-int8"]


def test_a_named_algorithm_has_no_substitute() -> None:
    made = chooser(allreduce="flash-int8")
    assert all(len(c.algorithms) == 1 for c in made.policy().choices("o_proj", 0, "prefill"))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="magic"):
        PolicyRequest(row_elems=64, max_rows=1, max_decode_rows=1, decode="magic")


def slow_wire(name: str) -> list[tuple[int, float]]:
    """Times of a wire so slow that bytes are all that counts; everything was measured."""
    setting = Setting(transport="process-group", device="cpu", world_size=2, num_nodes=1, dtype="bfloat16")
    costs = CostModel(setting)
    return [(size, 100 + costs.wire_bytes(name, size) / 10) for size in (2 * ROW, 2 * ROW * 64, 2 * ROW * 512)]


def slow_points(made: Chooser) -> dict[str, list[tuple[int, float]]]:
    return {name: slow_wire(name) for name in made.candidates()}


@pytest.mark.parametrize(
    ("budget", "codec"), [(0.5, "int3"), (0.12, "int4"), (0.06, "int5"), (0.03, "int6"), (0.01, "int8"), (0.001, None)]
)
def test_an_error_budget_buys_the_fastest_codec_within_it_for_prompt_rows(budget: float, codec: str | None) -> None:
    made = chooser(transport="process-group")
    made = chooser(transport="process-group", points=slow_points(made), budget=ErrorBudget(budget))
    prefill = first(made, "down_proj", "prefill")
    if codec is None:
        assert lossless(prefill)
    else:
        assert prefill == [f"flash-{codec}"]
        assert made.error(prefill[0]) <= budget
    assert lossless(first(made, "down_proj", "decode")) and lossless(first(made, "embed", "prefill"))


@pytest.mark.parametrize(
    ("budget", "codec"),
    [(0.1, "int3"), (0.02, "int4"), (0.005, "int5"), (0.002, "int6"), (0.001, "int8"), (1e-4, None)],
)
def test_a_budget_of_kl_buys_the_fastest_codec_on_the_measured_front(budget: float, codec: str | None) -> None:
    made = chooser(transport="process-group")
    made = chooser(transport="process-group", points=slow_points(made), budget=ErrorBudget(budget, is_kl=True))
    (choice,) = made.policy().choices("down_proj", 0, "prefill") if codec else (None,)
    assert (choice is None and lossless(first(made, "down_proj", "prefill"))) or (
        choice is not None and choice.algorithms[0] == f"flash-{codec}" and "measured on SmolLM2-135M" in choice.reason
    )
    assert lossless(first(made, "down_proj", "decode"))
    refused = {verdict.algorithm: verdict.why for verdict in made.verdicts("down_proj", "prefill", 64 * 2 * ROW)}
    if codec not in ("int3",):
        assert f"exceeds the budget of kl={budget:g}: KL 0.08," in refused["flash-int3"]


def test_a_budget_of_kl_is_compared_with_the_figures_of_the_model_in_use() -> None:
    """Figures of another model are said to be that, with the command that measures this one."""
    made = chooser(transport="process-group")
    others = chooser(transport="process-group", points=slow_points(made), budget=ErrorBudget(0.02, is_kl=True))
    assert others.warning is not None and "`tightwire tune --quality MODEL` measures this model" in others.warning
    losses = {"flash-int8": Loss(0.001, 0.001), "flash-int4": Loss(0.5, 0.6)}
    own = Accuracy(losses=losses, measured_on="on this model with 2 ranks", of_this_model=True)
    made = chooser(
        transport="process-group", points=slow_points(made), budget=ErrorBudget(0.02, is_kl=True), accuracy=own
    )
    (choice,) = made.policy().choices("down_proj", 0, "prefill")
    assert choice.algorithms[0] == "flash-int8" and made.warning is None
    assert "KL 0.001, perplexity +0.1 % (measured on this model with 2 ranks) within the budget" in choice.reason
    refused = {verdict.algorithm: verdict.why for verdict in made.verdicts("down_proj", "prefill", 64 * 2 * ROW)}
    assert refused["flash-int4"].startswith("exceeds the budget of kl=0.02: KL 0.5")
    assert "its cost in accuracy is not known; `tightwire tune --quality MODEL --allreduce" in refused["flash-int5"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "flash-int4",
            "--allreduce flash-int4: KL 0.016, perplexity +1.6 % (measured on SmolLM2-135M, the worst of 2, 4 and 8 ranks; `tightwire",
        ),
        ("flash-int4-plain", "flash-int4-plain: its cost in accuracy is not known; `tightwire tune --quality MODEL"),
        (
            "hierarchical:int8-g64",
            "its cost in accuracy is not known, because `tightwire tune --quality` measures sums on one",
        ),
        ("ring", "--allreduce ring"),
    ],
)
def test_the_reason_of_a_named_algorithm_says_what_it_costs(name: str, said: str) -> None:
    (choice,) = chooser(allreduce=name, row_elems=640).policy().choices("o_proj", 0, "prefill")
    assert said in choice.reason and ("accuracy" in choice.reason or "KL" in choice.reason) == (name != "ring")


def test_decode_rows_have_a_budget_of_their_own() -> None:
    """Quantized on a slow wire, by the figures of prompt rows, with 8 bits in the first layer and the last sum."""
    points, kl = slow_points(chooser(transport="process-group")), ErrorBudget(0.02, is_kl=True)
    made = chooser(transport="process-group", points=points, decode=kl, num_layers=30)
    (choice,) = made.policy().choices("o_proj", 3, "decode")
    assert choice.algorithms[0] == "flash-int4" and "KL 0.016" in choice.reason and "within the budget" in choice.reason
    assert first(made, "o_proj", "decode") == ["flash-int8"]
    assert lossless(first(made, "o_proj", "prefill")) and lossless(first(made, "embed", "decode"))
    assert made.warning is not None and made.warning.startswith("--allreduce-decode kl=0.02 is compared")
    refused = verdict_of(made.verdicts("o_proj", "decode", 2 * ROW, layer=3), "flash-int3")
    assert refused.why.startswith("exceeds the budget of kl=0.02")
    both = chooser(transport="process-group", points=points, allreduce="flash-int8", decode=ErrorBudget(0.03))
    assert first(both, "o_proj", "prefill") == ["flash-int8"] and first(both, "o_proj", "decode") == ["flash-int6"]
    named = chooser(transport="process-group", points=points, allreduce="ring", decode=ErrorBudget(0.03))
    assert first(named, "o_proj", "prefill") == ["ring"] and first(named, "o_proj", "decode") == ["flash-int6"]


def test_a_fast_wire_gives_up_no_accuracy_for_any_budget() -> None:
    made = chooser(transport="shared-memory", budget=ErrorBudget(1.0, is_kl=True))
    assert lossless(first(made, "down_proj", "prefill"))


def test_within_a_phase_a_lossy_sum_is_used_at_every_size_or_not_at_all() -> None:
    points = slow_points(chooser(transport="process-group"))
    made = chooser(transport="process-group", points=points, budget=ErrorBudget(0.5))
    assert len(made.policy().choices("o_proj", 0, "prefill")) == 1
    substitutes = made.policy().choices("o_proj", 0, "prefill")[0].algorithms[1:]
    assert substitutes and lossless(list(substitutes))


def test_a_codec_whose_groups_cross_rows_is_not_chosen_and_said_when_named() -> None:
    made = chooser(transport="process-group", row_elems=72, budget=ErrorBudget(0.9))
    assert lossless(first(made, "o_proj", "prefill"))
    (choice,) = chooser(allreduce="flash-int8-plain").policy().choices("o_proj", 0, "prefill")
    assert "groups of 128 cross rows of 576, so a text may depend on what is prefilled" in choice.reason
    (choice,) = chooser(decode="flash-int8-plain").policy().choices("o_proj", 0, "decode")
    assert "cross rows of 576, so a text may depend on what is generated with it" in choice.reason
    (choice,) = chooser(allreduce="flash-int8").policy().choices("o_proj", 0, "prefill")
    assert "cross" not in choice.reason


@pytest.mark.parametrize("asked", [{"allreduce": "flash-int4"}, {"budget": ErrorBudget(0.12)}])
def test_a_preset_of_less_than_eight_bits_spares_the_first_layer_and_the_last_sum(asked: dict[str, Any]) -> None:
    made = chooser(transport="process-group")
    if "budget" in asked:
        asked = asked | {"points": slow_points(made)}
    policy = chooser(transport="process-group", num_layers=30, **asked).policy()
    used = {(site, at): policy.choices(site, at, "prefill")[0] for site in SITES for at in (0, 1, 28, 29)}
    spared = {place for place, choice in used.items() if choice.algorithms[0] == "flash-int8"}
    assert spared == {("o_proj", 0), ("down_proj", 0), ("down_proj", 29)}
    assert all("8 bits in the first layer and the last sum" in used[place].reason for place in spared)
    others = {
        choice.algorithms[0] for (site, at), choice in used.items() if site != "embed" and (site, at) not in spared
    }
    assert others == {"flash-int4"}
    assert lossless(list(policy.choices("down_proj", 29, "decode")[0].algorithms))


@pytest.mark.parametrize(
    "asked", ["flash-int8", "flash-int4-plain", "flash:int4-g64-had-ef,int4-g64-had-ef", "two-shot"]
)
def test_other_names_sum_every_layer_alike(asked: str) -> None:
    policy = chooser(num_layers=30, allreduce=asked).policy()
    assert all(rule.layers is None for rule in policy.rules)


def test_measurements_overrule_seeds() -> None:
    flat = {"one-shot": 50.0, "two-shot": 10.0}
    points = {name: [(64, us), (1 << 24, us)] for name, us in flat.items()}
    assert first(chooser(4, points=points), "o_proj", "decode") == ["two-shot"]


def test_a_gain_within_noise_is_no_reason_to_switch() -> None:
    points = {"one-shot": [(1152, 100.0), (1 << 20, 100.0)], "two-shot": [(1152, 101.0), (1 << 20, 98.0)]}
    assert first(chooser(4, points=points), "o_proj", "prefill") == ["one-shot"]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_auto_is_within_the_switching_margin_of_the_best_of_its_order_at_every_size(world_size: int) -> None:
    made = chooser(world_size)
    for size in size_grid(2 * ROW, 2 * ROW * 512):
        verdicts = {verdict.algorithm: verdict for verdict in made.verdicts("o_proj", "prefill", size)}
        chosen = next(v for v in verdicts.values() if v.chosen)
        assert chosen.us <= 1.031 * min(verdicts[name].us for name in ("one-shot", "two-shot"))


def test_what_summed_wrongly_when_measured_is_not_used() -> None:
    made = chooser(4, wrong={"one-shot": "1152 B: off by 3"})
    assert made.policy().algorithms == ("two-shot",)
    refused = {v.algorithm: v.why for v in made.verdicts("o_proj", "decode", 1152)}
    assert "summed wrongly when measured: 1152 B: off by 3" in refused["one-shot"]


def test_where_all_that_auto_may_use_summed_wrongly_the_error_says_so() -> None:
    wrong = {"one-shot": "1152 B: off by 3", "two-shot": "1152 B: changed its input"}
    with pytest.raises(
        QuarantinedError, match=r"one-shot: summed wrongly.* off by 3.*ring: sums depend.*tightwire tune"
    ):
        chooser(4, wrong=wrong).policy()


def test_measurements_of_what_may_not_be_used_leave_the_choice_to_the_seeds() -> None:
    for name in ("ring", "flash:int8-g64,int8-g64"):
        made = chooser(4, points={name: [(1152, 1.0)]})
        assert made.policy() == chooser(4).policy()


def test_nodes_make_hierarchical_a_candidate_and_one_node_does_not() -> None:
    assert "hierarchical" not in chooser(4).candidates()
    made = chooser(4, num_nodes=2)
    assert "hierarchical" in made.candidates()
    orders = {name in ("one-shot", "two-shot") for name in first(made, "o_proj", "prefill")}
    assert len(orders) == 1, "one order of summing in a phase"


def test_over_our_own_sockets_auto_opens_no_connections_of_gloo() -> None:
    setting = Setting(transport="sockets", device="cpu", world_size=2, num_nodes=2, dtype="bfloat16")
    refusal = parse_all_reduce("native").refusal(setting)
    assert refusal is not None and "ports that a firewall may block" in refusal
    assert parse_all_reduce("ring").refusal(setting) is None


def test_on_cuda_the_librarys_own_sum_is_a_candidate_for_any_number_of_ranks() -> None:
    made = chooser(4, transport="process-group", device="cuda")
    assert "native" in made.policy().algorithms


def verdict_of(verdicts: list[Verdict], name: str) -> Verdict:
    return next(verdict for verdict in verdicts if verdict.algorithm == name)


def test_verdicts_say_of_every_candidate_what_it_costs_and_why_not() -> None:
    made = chooser(4)
    verdicts = made.verdicts("o_proj", "prefill", 2 * ROW * 512)
    assert [v.chosen for v in verdicts] == [True] + [False] * (len(verdicts) - 1)
    assert verdicts[0].algorithm == "two-shot" and verdicts[0].why == "fastest lossless"
    assert verdict_of(verdicts, "one-shot").why.endswith("times as slow")
    assert "depend on an element's place" in verdict_of(verdicts, "ring").why
    lossy = verdict_of(verdicts, "flash-int3")
    assert "no error budget" in lossy.why and lossy.error > 0.1 and lossy.wire_bytes < verdicts[0].wire_bytes
    assert all(v.measured_us is None and v.predicted_us > 0 for v in verdicts)


def test_beside_a_named_algorithm_the_others_were_not_asked_for() -> None:
    verdicts = chooser(allreduce="flash-int8").verdicts("o_proj", "prefill", 1152)
    assert verdicts[0].algorithm == "flash-int8" and verdicts[0].chosen
    assert all(v.why == "not requested: --allreduce flash-int8" for v in verdicts[1:])


def test_an_exceeded_budget_is_the_reason() -> None:
    verdicts = chooser(budget=ErrorBudget(0.02)).verdicts("o_proj", "prefill", 1152)
    assert "exceeds the budget of 0.02" in verdict_of(verdicts, "flash-int4").why
    assert verdict_of(verdicts, "flash-int8").why.endswith("times as slow")
