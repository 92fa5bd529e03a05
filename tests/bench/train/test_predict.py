"""What a step should take: tasks over a shared wire by hand, and the engine's rules where the answer is known."""

import math

import pytest

from tightwire.bench.train.formulas import Formulas, formulas_of
from tightwire.bench.train.models import open_model
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.predict import Computing, Rates, predict_step
from tightwire.bench.train.simulate import Task, simulate

_OWN = ("none", "zero1", "zero2", "zero3", "zero3-flat", "zero3-on-demand", "zero++", "hybrid", "dgc")
_NO_COMPUTING = Computing(0.0, 0.0, 0.0)
_COMPUTING = Computing(0.3, 0.6, 0.1)
_SLOW = Rates(across_bytes_per_s=1e5, across_round_s=0.0, inside_bytes_per_s=math.inf, inside_round_s=0.0)
_FAST = Rates(math.inf, 0.0, math.inf, 0.0)


@pytest.fixture(scope="module")
def formulas() -> dict[str, Formulas]:
    options = TrainBenchOptions(model="tiny", arms=_OWN)
    return formulas_of(options, open_model("tiny", 0).config)


def predict(formulas: Formulas, computing: Computing, rates: Rates) -> float:
    traffic = formulas.busiest
    return predict_step(traffic.plan, formulas.options, traffic.flows, traffic.slots, computing, rates)


def test_who_sends_beside_another_gets_half_of_the_wire() -> None:
    tasks = [
        Task("a", "one", (), 1.0, 2.0),
        Task("b", "two", (), 2.0, 2.0),
        Task("c", "two", ("a",), 0.5),
    ]

    ends = simulate(tasks)

    # a is alone on the wire from 1 to 2, then both halve it until a ends at 4; b has 1 left and takes until 5.
    assert ends == pytest.approx({"a": 4.0, "b": 5.0, "c": 5.5})


def test_what_no_task_is_is_over() -> None:
    assert simulate([Task("a", "one", ("gather -1",), 1.0)]) == pytest.approx({"a": 1.0})


def test_tasks_that_wait_for_each_other_are_named() -> None:
    tasks = [Task("a", "one", ("b",), 1.0), Task("b", "two", ("a",), 1.0)]

    with pytest.raises(ValueError, match="wait for each other: a, b"):
        simulate(tasks)


@pytest.mark.parametrize("arm", _OWN)
def test_without_computing_a_step_is_its_bytes(arm: str, formulas: dict[str, Formulas]) -> None:
    between = formulas[arm].busiest.between_nodes

    assert predict(formulas[arm], _NO_COMPUTING, _SLOW) == pytest.approx(between / _SLOW.across_bytes_per_s)


@pytest.mark.parametrize("arm", _OWN)
def test_without_bytes_a_step_is_its_computing(arm: str, formulas: dict[str, Formulas]) -> None:
    assert predict(formulas[arm], _COMPUTING, _FAST) == pytest.approx(sum(_COMPUTING))


def test_whole_copies_hide_all_sums_but_those_that_backward_ends_with(formulas: dict[str, Formulas]) -> None:
    slots = formulas["none"].busiest.slots
    rates = Rates(1e9, 0.0, math.inf, 0.0)
    last = sum(slots[unit].between_nodes for unit in ("blocks.0", "norms", "embedding"))

    step_s = predict(formulas["none"], _COMPUTING, rates)

    assert step_s == pytest.approx(sum(_COMPUTING) + last / rates.across_bytes_per_s)


def test_weights_that_are_asked_for_ahead_come_while_others_compute(formulas: dict[str, Formulas]) -> None:
    rates = _SLOW._replace(across_bytes_per_s=2e6)

    ahead, on_demand = (predict(formulas[arm], _COMPUTING, rates) for arm in ("zero3", "zero3-on-demand"))

    assert sum(_COMPUTING) < ahead < on_demand


def test_a_node_that_keeps_weights_gathers_across_once(formulas: dict[str, Formulas]) -> None:
    traffic = formulas["zero++"].busiest
    across = {flow.flat: flow.calls for flow in traffic.flows if flow.op == "gather_across"}

    assert set(across.values()) == {1}
    assert traffic.between_nodes < formulas["zero3"].busiest.between_nodes / 4
