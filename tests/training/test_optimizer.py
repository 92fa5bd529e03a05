"""Optimizers over shards: weight decay, refused options, bytes of state; and the learning rate of each step."""

from typing import Any

import pytest
import torch

from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.config.tree import ScheduleConfig
from tightwire.training.estimate.memory import measure_optimizer
from tightwire.training.optimizer import learning_rate, make_optimizer, names_of_state


def _make(**values: object) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(4))], "name": name} for name in ("norms", "matrices")]
    return make_optimizer(OptimizerConfig.model_validate(values), groups)


def test_only_matrices_decay() -> None:
    optimizer = _make(weight_decay=0.3)
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups} == {"norms": 0.0, "matrices": 0.3}


def test_options_are_passed_to_the_optimizer_class() -> None:
    assert _make(name="AdamW", options={"betas": [0.8, 0.9]}).defaults["betas"] == (0.8, 0.9)
    assert _make(name="sgd", options={"momentum": 0.5}).defaults["momentum"] == 0.5


def test_shards_are_updated_one_by_one_unless_asked_otherwise() -> None:
    """Torch's default on CUDA holds temporaries of all at once."""
    chosen = [_make(options=options).defaults for options in ({}, {"foreach": True}, {"fused": True})]
    assert [(each["foreach"], each["fused"]) for each in chosen] == [(False, None), (True, None), (None, True)]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, {"step", "exp_avg", "exp_avg_sq"}),
        ({"options": {"amsgrad": True}}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        ({"name": "adagrad"}, {"step", "sum"}),
        ({"name": "rmsprop", "options": {"momentum": 0.9}}, {"step", "square_avg", "momentum_buffer"}),
        ({"name": "sgd"}, set()),
        ({"name": "sgd", "options": {"momentum": 0.9}}, {"momentum_buffer"}),
    ],
    ids=("adamw", "amsgrad", "adagrad", "rmsprop", "sgd", "momentum"),
)
def test_what_an_optimizer_keeps_depends_on_its_options(values: dict[str, Any], names: set[str]) -> None:
    assert names_of_state(_make(**values)) == names


def test_unknown_optimizer_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AdamW has no option 'beta'; did you mean 'betas'\?"):
        _make(options={"beta": 1})
    with pytest.raises(ValueError, match="AdamW refuses .*: Invalid beta"):
        _make(options={"betas": [2, 2]})
    with pytest.raises(ValueError, match=r"optimizer: AdamW refuses lr=1e\+300, {}: .* overflow"):
        _make(lr=1e300)
    for options in (
        {"betas": [0.9]},
        {"betas": {"first": 0.9}},
        {"eps": "small"},
        {"capturable": True},
        {"differentiable": True},
    ):
        with pytest.raises(ValueError, match=r"optimizer: AdamW refuses lr=0.0003, .*: ."):
            _make(options=options)
    with pytest.raises(ValueError, match="optimizer.options: amsgrad must be true or false, got 'false'"):
        _make(options={"amsgrad": "false"})
    with pytest.raises(ValueError, match="options.eps must be finite, got nan"):
        OptimizerConfig(options={"eps": float("nan")})
    with pytest.raises(ValueError, match="set optimizer.lr"):
        OptimizerConfig(options={"lr": 1})


@pytest.mark.parametrize(
    ("values", "num_bytes"), [({}, 8), ({"name": "sgd"}, 0), ({"name": "sgd", "options": {"momentum": 0.9}}, 4)]
)
def test_bytes_of_optimizer_state_are_counted(values: dict[str, object], num_bytes: int) -> None:
    assert measure_optimizer(OptimizerConfig.model_validate(values)).kept == num_bytes


def _rates(**values: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(values)
    return [learning_rate(schedule, 2.0, step) for step in range(schedule.steps)]


def test_warm_up_rises_to_the_peak() -> None:
    assert _rates(steps=5, warmup_steps=4, kind="constant") == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_ends_at_its_share() -> None:
    assert _rates(steps=5, kind="linear", final_share=0.5) == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])


def test_cosine_is_halfway_in_the_middle() -> None:
    rates = _rates(steps=7, warmup_steps=2, kind="cosine", final_share=0.0)
    assert rates[2:] == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5, 0.0])


def test_a_run_with_only_warm_up_reaches_the_peak() -> None:
    assert _rates(steps=2, warmup_steps=2) == [1.0, 2.0]
