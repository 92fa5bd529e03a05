"""Optimizers over flat shards: what decays, what a configuration may ask, what their state takes."""

import pytest
import torch

from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.estimate.footprint import optimizer_bytes
from tightwire.training.optimizer.make import make_optimizer, set_learning_rate


def _make(**values: object) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(4))], "name": name} for name in ("norms", "matrices")]
    return make_optimizer(OptimizerConfig.model_validate(values), groups)


def test_only_matrices_decay() -> None:
    optimizer = _make(weight_decay=0.3)
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups} == {"norms": 0.0, "matrices": 0.3}
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_options_go_to_the_class() -> None:
    assert _make(name="AdamW", options={"betas": [0.8, 0.9]}).defaults["betas"] == (0.8, 0.9)
    assert _make(name="sgd", options={"momentum": 0.5}).defaults["momentum"] == 0.5


def test_options_that_the_class_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AdamW has no option 'beta'; did you mean betas\?"):
        _make(options={"beta": 1})
    with pytest.raises(ValueError, match="AdamW refuses them: Invalid beta"):
        _make(options={"betas": [2, 2]})
    for options in ({"betas": [0.9]}, {"eps": "small"}, {"capturable": True}, {"differentiable": True}):
        with pytest.raises(ValueError, match=r"optimizer.options: AdamW refuses them: ."):
            _make(options=options)
    with pytest.raises(ValueError, match="options.eps must be finite, got nan"):
        OptimizerConfig(options={"eps": float("nan")})
    with pytest.raises(ValueError, match="set optimizer.lr itself"):
        OptimizerConfig(options={"lr": 1})


@pytest.mark.parametrize(
    ("values", "num_bytes"), [({}, 8), ({"name": "sgd"}, 0), ({"name": "sgd", "options": {"momentum": 0.9}}, 4)]
)
def test_state_is_counted(values: dict[str, object], num_bytes: int) -> None:
    assert optimizer_bytes(OptimizerConfig.model_validate(values), 10) == 10 * num_bytes
