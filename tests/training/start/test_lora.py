"""LoRA's layers beside PEFT's: the same gradients on any number of ranks and in every sharding."""

import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.adapted_llama import adapted_llama
from helpers.training.training_ranks import batches_of, loss_of, run_training
from torch import Tensor, nn

from tightwire.training.config.learning import LoraConfig
from tightwire.training.config.sharding import SHARDINGS
from tightwire.training.engine.options import EngineOptions
from tightwire.training.start.lora import add_lora, initial_matrix

_CONFIG = LoraConfig(rank=4, alpha=8)


def _gradients_of_peft(model: nn.Module, config: LoraConfig, batches: Tensor) -> dict[str, Tensor]:
    import peft

    settings: Any = {"use_rslora": config.rslora, "lora_dropout": 0.0, "target_modules": config.targets or "all-linear"}
    theirs = peft.get_peft_model(small_llama(), peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, **settings))  # pyright: ignore[reportArgumentType]
    ours = dict(model.named_parameters())
    adapters = {
        name.removeprefix("base_model.model.").replace(".default.", "."): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert adapters.keys() == {name for name, parameter in ours.items() if parameter.requires_grad}
    for name, parameter in adapters.items():
        parameter.data.copy_(ours[name].data)
    tokens = batches[0].flatten(0, 1)
    (sum(loss_of(theirs, each) for each in tokens) / len(tokens)).backward()  # pyright: ignore[reportAttributeAccessIssue]
    return {name: parameter.grad for name, parameter in adapters.items() if parameter.grad is not None}


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed (pip install peft)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("world_size", "num_nodes", "options"),
    [
        (1, 1, {"sharding": SHARDINGS["none"]}),
        (2, 1, {"sharding": SHARDINGS["zero1"]}),
        (2, 1, {"sharding": SHARDINGS["zero2"]}),
        (4, 1, {"checkpoint_blocks": 9}),
        (4, 2, {"sharding": SHARDINGS["hybrid"]}),
        (4, 2, {"secondary": True, "reduce_path": "hierarchical"}),
    ],
    ids=str,
)
def test_gradients_equal_those_of_peft(world_size: int, num_nodes: int, options: dict[str, Any]) -> None:
    model, batches = adapted_llama(_CONFIG), batches_of(world_size, num_steps=1, accumulation=2)

    runs = run_training(copy.deepcopy(model), replace(EngineOptions(), **options), batches, num_nodes)

    want = _gradients_of_peft(model, _CONFIG, batches)
    for run in runs:
        assert run.gradients[0].keys() == want.keys()
        for name, grad in run.gradients[0].items():
            assert want[name].any()
            torch.testing.assert_close(grad, want[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed (pip install peft)")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_rank_stabilized_adapters_of_some_layers_equal_those_of_peft() -> None:
    config = LoraConfig(rank=4, alpha=8, rslora=True, targets=["q_proj", "down_proj"])
    model, batches = adapted_llama(config), batches_of(1, num_steps=1, accumulation=1)

    (run,) = run_training(copy.deepcopy(model), EngineOptions(), batches)

    want = _gradients_of_peft(model, config, batches)
    for name, grad in run.gradients[0].items():
        torch.testing.assert_close(grad, want[name], rtol=0, atol=1e-6, msg=name)


def test_only_inputs_of_adapters_are_dropped_and_only_in_training() -> None:
    torch.manual_seed(3)
    model, tokens = adapted_llama(LoraConfig(rank=4, dropout=0.5)), torch.arange(8).view(1, 8)
    same = adapted_llama(LoraConfig(rank=4)).eval()(tokens).logits

    assert torch.equal(model.eval()(tokens).logits, same)
    assert not torch.equal(model.train()(tokens).logits, same)


def test_matrices_begin_as_peft_begins_them() -> None:
    """B with zeros; A uniform up to 1 / sqrt(inputs), by seed and name alone."""
    name, shape = "model.layers.0.mlp.up_proj.lora_A.weight", (96, 64)
    a_RD = initial_matrix(name, shape, _CONFIG, seed=1)
    assert a_RD.shape == (4, 64) and 0.11 < a_RD.abs().max() <= 1 / 8
    assert torch.equal(a_RD, initial_matrix(name, shape, _CONFIG, seed=1))
    assert not torch.equal(a_RD, initial_matrix(name, shape, _CONFIG, seed=2))
    b_OR = initial_matrix(name.replace("_A", "_B"), shape, _CONFIG, seed=1)
    assert b_OR.shape == (96, 4) and not b_OR.any()


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no linear layer c_proj; they have down_proj, gate_proj, k_proj"):
        add_lora(small_llama(), LoraConfig(targets=["c_proj"]))
