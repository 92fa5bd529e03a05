"""Frozen flat parameters are kept as encoded bytes, the same on any number of ranks, once a node with ``secondary``."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.training_ranks import (
    Run,
    batches_of,
    frozen_bytes,
    open_engine,
    run_groups,
    run_training,
    train,
)
from torch import Tensor

from tightwire.comm.codec.codec import parse_codec
from tightwire.training.config.sharding import SHARDINGS, GroupShape
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import plan_buckets
from tightwire.training.engine.options import EngineOptions
from tightwire.training.engine.shards import form_of
from tightwire.training.ranks.groups import TrainGroups

FROZEN = ("model.embed_tokens", "lm_head", *(f"model.layers.{i}.{m}" for i in range(4) for m in ("mlp", "self")))
INT4 = EngineOptions(frozen_codec="int4")
TOKENS = torch.arange(12).view(1, 12)


@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
def test_a_frozen_block_costs_its_encoded_bytes(codec: str) -> None:
    plan = plan_buckets(small_llama(frozen=FROZEN), 1)
    model = small_llama(frozen=FROZEN)

    with open_engine(model, in_process_train_groups(1)[0], EngineOptions(frozen_codec=codec)) as engine:
        shards = engine._shards.frozen
        for flat_param in plan.flat_params:
            if not flat_param.trainable and flat_param.name.startswith("blocks"):
                num_bytes = parse_codec(codec).wire_bytes(flat_param.num_elems, 4)
                assert shards[flat_param.name].encoded.nbytes == num_bytes
    assert not any(flat_param.name.startswith("blocks") for flat_param, _ in engine.named_flat_params())


def _logits(engine: Engine, model: torch.nn.Module) -> Tensor:
    with engine.evaluation():
        return model(TOKENS).logits.clone()


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_frozen_weights_have_the_same_values_on_any_number_of_ranks(sharding: str) -> None:
    """On one rank too, so a run may go on with more ranks or fewer."""
    model = small_llama(frozen=FROZEN)

    def run_rank(groups: TrainGroups) -> tuple[Tensor, dict[tuple[str, int], int]]:
        own = copy.deepcopy(model)
        with open_engine(own, groups, replace(INT4, sharding=SHARDINGS[sharding])) as engine:
            return _logits(engine, own), engine.frozen_sums()

    ((alone, sums_alone),) = run_groups(in_process_train_groups(1), run_rank)
    results = run_groups(in_process_train_groups(4, num_nodes=2), run_rank)

    assert not torch.equal(alone, model(TOKENS).logits)  # they are quantized
    assert all(torch.equal(logits, alone) for logits, _ in results)
    together = {shard: value for _, sums in results for shard, value in sums.items()}
    assert sum(together.values()) == sum(sums_alone.values())


def test_with_secondary_gathers_of_frozen_weights_never_leave_the_node() -> None:
    """From the first one on, because each node reads all of the frozen weights."""
    models = [small_llama(frozen=FROZEN) for _ in range(4)]

    def run_rank(groups: TrainGroups) -> int:
        own = models[groups.main.rank]
        with open_engine(own, groups, replace(INT4, secondary=True)) as engine:
            _logits(engine, own)
            assert groups.gather.nodes is not None
            return groups.gather.nodes.across.bytes_sent

    plan = plan_buckets(models[0], 4)
    norms = next(bucket for bucket in plan.buckets if bucket.name == "norms")
    form = form_of(INT4, norms, norms.flat_params[0], GroupShape(2, 2))
    assert run_groups(in_process_train_groups(4, num_nodes=2), run_rank) == [form.wire_bytes] * 4  # trainable norms


@pytest.mark.parametrize("secondary", [False, True])
def test_where_frozen_weights_lie_changes_no_bit(secondary: bool) -> None:
    model, batches = small_llama(frozen=FROZEN), batches_of(4, num_steps=2, accumulation=2)

    got, want = (
        run_training(model, options, batches, num_nodes=2)
        for options in (replace(INT4, secondary=secondary), replace(INT4, gather_path="flat"))
    )

    assert [run.losses for run in got] == [run.losses for run in want]


def test_bytes_of_frozen_weights_are_those_of_the_codec_after_training() -> None:
    """A digest before and after; the bytes decode to the quantized weights of the model."""
    model, batches = small_llama(frozen=FROZEN), batches_of(1, num_steps=3, accumulation=1)
    given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def run_rank(groups: TrainGroups) -> Run:
        with open_engine(model, groups, INT4) as engine:
            before = frozen_bytes(engine)
            run = train(engine, model, batches, 0)
            assert before and frozen_bytes(engine) == before
            shard = engine._shards.frozen["blocks.1.frozen"]
            decoded_N = torch.empty(shard.flat_param.num_elems)
            shard.form.codec.decode(shard.encoded, decoded_N.numel(), torch.float32, decoded_N)
            for param in shard.flat_param.params:
                assert (param.of(decoded_N) - given[param.name]).abs().max() < 0.02
            return run

    (run,) = run_groups(in_process_train_groups(1), run_rank)
    assert run.parameters.keys() == {name for name in given if not name.startswith(FROZEN)}
