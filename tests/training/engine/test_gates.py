"""Blocks are called as they like: by keyword, with tensors in containers, several outputs, and weights that are not used."""

import copy
from typing import Any

import pytest
import torch
from helpers.server.keyword_model import BLOCKS, KeywordModel, keyword_loss
from helpers.training.trace_check import Trace
from helpers.training.training_ranks import batches_of, open_engine, reference, run_groups, train
from torch import nn

from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import in_process_train_groups


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_keyword_inputs_in_containers_are_gated(checkpoint_every: int) -> None:
    model, options = KeywordModel(), EngineOptions(checkpoint_every=checkpoint_every)
    batches = batches_of(2, num_steps=3, accumulation=2)
    for layer in model.layers:
        layer.unused = nn.Linear(2, 3)
    models = [copy.deepcopy(model) for _ in range(2)]
    orders = []

    def run_rank(groups: Any) -> Any:
        own, trace = models[groups.rank], Trace()
        with open_engine(own, groups, options, BLOCKS, trace) as engine:
            with engine.micro_batch(last=True):
                keyword_loss(own, batches[0, 0, groups.rank]).backward()
            engine.finish_gradients()
            orders.append([(e.bucket, e.begins) for e in trace.events if e.kind == "compute" and "blocks" in e.bucket])
            engine.weights_changed()
            return train(engine, own, batches, groups.rank, loss=keyword_loss)

    runs = run_groups(in_process_train_groups(2), run_rank)

    # A block's backward has ended before that of the one before it begins.
    forward = [(f"blocks.{i}", begins) for i in range(4) for begins in (True, False)]
    backward = [(f"blocks.{i}", begins) for i in (3, 2, 1, 0) for begins in (True, False)]
    assert orders == [forward + backward] * 2
    want = reference(model, options, batches, loss=keyword_loss)
    assert [run.losses for run in runs] == [run.losses for run in want]
    unlike = [n for n, value in want[0].parameters.items() if not torch.equal(runs[0].parameters[n], value)]
    assert not unlike


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 2, 1, 3), (0, 1, 3)], ids=["reversed", "mixed", "skipped"])
@pytest.mark.parametrize("prefetch", ["explicit", "implicit"])
def test_another_order_of_blocks_is_refused_at_once(order: tuple[int, ...], prefetch: Any) -> None:
    """Their weights would be awaited in buffers that hold those of other blocks."""

    def run_rank(groups: Any) -> str:
        own = KeywordModel()
        with open_engine(own, groups, EngineOptions(prefetch=prefetch), BLOCKS) as engine:
            own.layers = nn.ModuleList(own.layers[number] for number in order)
            with pytest.raises(RuntimeError, match="weights are gathered in the order") as refused, engine.evaluation():
                own(batches_of(2, 1, 1)[0, 0, groups.rank])
            return str(refused.value)

    first = {(3, 2, 1, 0): "blocks.3 was called before blocks.0", (0, 2, 1, 3): "blocks.2 was called before blocks.1"}
    messages = run_groups(in_process_train_groups(2), run_rank)
    assert all(text.startswith(first.get(order, "blocks.3 was called before blocks.2")) for text in messages)
