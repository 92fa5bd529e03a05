"""Blocks are called as they like: by keyword, with tensors in containers, several outputs, and weights that are not used."""

import copy
from threading import Barrier
from typing import Any

import pytest
import torch
from helpers.training.keyword_model import WIDTH, KeywordBlock, KeywordModel, keyword_loss
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.trace_check import Trace
from helpers.training.training_ranks import batches_of, open_engine, reference, run_groups, train
from torch import nn

from tightwire.training.engine.autograd import gradient_view
from tightwire.training.engine.options import EngineOptions


@pytest.mark.parametrize("checkpoint_blocks", [0, 1])
def test_keyword_inputs_in_containers_are_gated(checkpoint_blocks: int) -> None:
    model, options = KeywordModel(), EngineOptions(checkpoint_blocks=checkpoint_blocks)
    batches = batches_of(2, num_steps=3, accumulation=2)
    for layer in model.layers:
        layer.unused = nn.Linear(2, 3)
    models = [copy.deepcopy(model) for _ in range(2)]
    orders = []

    def run_rank(groups: Any) -> Any:
        own, trace = models[groups.main.rank], Trace()
        with open_engine(own, groups, options, trace) as engine:
            with engine.micro_batch(last=True):
                keyword_loss(own, batches[0, 0, groups.main.rank]).backward()
            engine.finish_gradients()
            orders.append([(e.bucket, e.begins) for e in trace.events if e.kind == "compute" and "blocks" in e.bucket])
            engine.weights_changed()
            return train(engine, own, batches, groups.main.rank, loss=keyword_loss)

    runs = run_groups(in_process_train_groups(2), run_rank)

    # A block's backward has ended before that of the one before it begins.
    forward = [(f"blocks.{i}", begins) for i in range(4) for begins in (True, False)]
    backward = [(f"blocks.{i}", begins) for i in (3, 2, 1, 0) for begins in (True, False)]
    assert orders == [forward + backward] * 2
    want = reference(model, options, batches, loss=keyword_loss)
    assert [run.losses for run in runs] == [run.losses for run in want]
    unlike = [n for n, value in want[0].parameters.items() if not torch.equal(runs[0].parameters[n], value)]
    assert not unlike


@pytest.mark.parametrize(
    ("order", "begins"),
    [
        ([3, 2, 1, 0], "blocks.3 was called before blocks.0"),
        ([0, 2, 1, 3], "blocks.2 was called before blocks.1"),
        ([0, 1, 3], "blocks.3 was called before blocks.2"),
    ],
    ids=["reversed", "mixed", "skipped"],
)
@pytest.mark.parametrize("prefetch", ["explicit", "forward", "backward", "implicit"])
def test_another_order_of_blocks_is_refused_at_once(order: list[int], begins: str, prefetch: Any) -> None:
    """Their weights would be awaited in buffers that hold those of other blocks."""
    both_refused = Barrier(2, timeout=30)  # a rank that closes its groups earlier fails the other one's gathers

    def run_rank(groups: Any) -> None:
        own = KeywordModel()
        with open_engine(own, groups, EngineOptions(prefetch=prefetch)) as engine:
            own.model["layers"] = nn.ModuleList(own.layers[number] for number in order)
            with pytest.raises(RuntimeError, match=begins), engine.evaluation():
                own(batches_of(2, 1, 1)[0, 0, groups.main.rank])
            both_refused.wait()

    run_groups(in_process_train_groups(2), run_rank)


class _OwnLinear(nn.Linear):
    """A linear layer that writes its weight's gradient itself, if ``writes``, and never returns one."""

    writes = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if hasattr(self.weight, "give_view"):
            return _OwnProduct.apply(input, self.weight, self.writes) + self.bias
        return nn.functional.linear(input, self.weight) + self.bias


class _OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, writes: bool) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.writes = weight, writes
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        if ctx.writes:
            view = gradient_view(ctx.weight, torch.float32)
            assert view is not None and gradient_view(ctx.weight, torch.float32) is None
            torch.mm(grad.flatten(0, -2).t(), x.flatten(0, -2), out=view)
        return grad @ weight, None, None


def _model_with_own_gradients() -> KeywordModel:
    model = KeywordModel()
    for block in model.layers:
        assert isinstance(block, KeywordBlock)
        block.right = _OwnLinear(WIDTH, WIDTH)
    return model


def test_a_layer_may_write_its_gradient_itself() -> None:
    model, batches = _model_with_own_gradients(), batches_of(2, num_steps=3, accumulation=1)
    models = [copy.deepcopy(model) for _ in range(2)]

    def run_rank(groups: Any) -> Any:
        with open_engine(models[groups.main.rank], groups, EngineOptions()) as engine:
            return train(engine, models[groups.main.rank], batches, groups.main.rank, loss=keyword_loss)

    runs = run_groups(in_process_train_groups(2), run_rank)

    want = reference(model, EngineOptions(), batches, loss=keyword_loss)
    assert [run.losses for run in runs] == [run.losses for run in want]
    assert all(torch.equal(runs[0].parameters[name], value) for name, value in want[0].parameters.items())


def test_a_layer_that_leaves_its_gradient_out_is_named() -> None:
    model = _model_with_own_gradients()
    for layer in model.modules():
        if isinstance(layer, _OwnLinear):
            layer.writes = False

    with open_engine(model, in_process_train_groups(1)[0], EngineOptions()) as engine:
        missing = "returned None as the gradient of model.layers.3.right.weight and has not written it"
        with pytest.raises(RuntimeError, match=missing), engine.micro_batch(last=True):
            keyword_loss(model, batches_of(1, 1, 1)[0, 0, 0]).backward()
