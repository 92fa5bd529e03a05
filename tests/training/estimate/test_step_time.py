"""Predicted step times: tasks that share a link, computed by hand; and the engine's rules where the answer is known."""

import math

import pytest

from tightwire.bench.train.measure import open_model
from tightwire.bench.train.options import TrainOptions
from tightwire.bench.train.report import model_arms
from tightwire.training.estimate.step import StepModel
from tightwire.training.estimate.step_time import Computing, Rates, Task, predict_step, simulate

_OWN = (
    "none",
    "zero1",
    "zero2",
    "zero3",
    "zero3-flat",
    "zero3-on-demand",
    "zero3-ahead-forward",
    "zero3-ahead-backward",
    "zero3-reshard-ends",
    "zero++",
    "hybrid",
    "dgc",
)
_NO_COMPUTING = Computing(0.0, 0.0, 0.0)
_COMPUTING = Computing(0.3, 0.6, 0.1)
_SLOW = Rates(across_bytes_per_s=1e5, across_round_s=0.0, inside_bytes_per_s=math.inf, inside_round_s=0.0)
_FAST = Rates(math.inf, 0.0, math.inf, 0.0)


@pytest.fixture(scope="module")
def models() -> dict[str, StepModel]:
    options = TrainOptions(model="tiny", arms=_OWN)
    return {arm: model.busiest for arm, model in model_arms(options, open_model("tiny", 0).config).items()}


def test_tasks_that_send_at_the_same_time_share_the_link() -> None:
    tasks = [
        Task("a", "one", (), 1.0, 2.0),
        Task("b", "two", (), 2.0, 2.0),
        Task("c", "two", ("a",), 0.5),
    ]

    ends = simulate(tasks)

    # a is alone on the wire from 1 to 2, then both halve it until a ends at 4; b has 1 left and takes until 5.
    assert ends == pytest.approx({"a": 4.0, "b": 5.0, "c": 5.5})


def test_a_task_does_not_wait_for_an_unknown_name() -> None:
    assert simulate([Task("a", "one", ("gather -1",), 1.0)]) == pytest.approx({"a": 1.0})


def test_tasks_that_wait_for_each_other_are_named() -> None:
    tasks = [Task("a", "one", ("b",), 1.0), Task("b", "two", ("a",), 1.0)]

    with pytest.raises(ValueError, match="wait for each other: a, b"):
        simulate(tasks)


@pytest.mark.parametrize("arm", _OWN)
def test_without_computing_a_step_takes_the_time_of_its_bytes(arm: str, models: dict[str, StepModel]) -> None:
    between = models[arm].between_nodes

    assert predict_step(models[arm], _NO_COMPUTING, _SLOW) == pytest.approx(between / _SLOW.across_bytes_per_s)


@pytest.mark.parametrize("arm", _OWN)
def test_without_bytes_a_step_takes_the_time_of_its_computing(arm: str, models: dict[str, StepModel]) -> None:
    assert predict_step(models[arm], _COMPUTING, _FAST) == pytest.approx(sum(_COMPUTING))


def test_replicas_overlap_all_sums_except_the_last_ones(models: dict[str, StepModel]) -> None:
    sums = models["none"].compressors
    rates = Rates(1e9, 0.0, math.inf, 0.0)
    last = sum(sums[bucket].between_nodes for bucket in ("blocks.0", "norms", "head", "embedding"))

    step_s = predict_step(models["none"], _COMPUTING, rates)

    assert step_s == pytest.approx(sum(_COMPUTING) + last / rates.across_bytes_per_s)


def test_explicit_prefetch_overlaps_gathers_with_computing(models: dict[str, StepModel]) -> None:
    rates = _SLOW._replace(across_bytes_per_s=2e6)

    arms = "zero3", "zero3-ahead-forward", "zero3-ahead-backward", "zero3-on-demand"
    both, forward, backward, none = (predict_step(models[arm], _COMPUTING, rates) for arm in arms)

    assert sum(_COMPUTING) < both < min(forward, backward) and max(forward, backward) < none


def test_kept_weights_are_gathered_across_nodes_once(models: dict[str, StepModel]) -> None:
    model = models["zero++"]
    across = {flow.flat_param: flow.calls for flow in model.flows if flow.op == "gather_across"}

    assert set(across.values()) == {1}
    assert model.between_nodes < models["zero3"].between_nodes / 4
