"""qwZ, hpZ and qgZ together and alone, and what users of other implementations have run into with them."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.training_ranks import (
    Run,
    assert_same,
    batches_of,
    open_engine,
    reference,
    run_groups,
    run_training,
    train,
)
from torch import Tensor

from tightwire.comm.codec.codec import Codec, parse_codec
from tightwire.training.config.sharding import SHARDINGS
from tightwire.training.engine.flat_parameters import NORMS, plan_buckets
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import TrainGroups

ZERO3 = EngineOptions()
BY_NODE = replace(ZERO3, reduce_path="hierarchical")


@pytest.mark.parametrize("asked", [{}, {"gather_path": "flat"}, {"prefetch": "implicit"}])
def test_node_copies_change_no_bit(asked: dict[str, Any]) -> None:
    """A copy kept over an optimizer step would (DeepSpeed #4851)."""
    model, batches = small_llama(frozen=("model.layers.1",)), batches_of(4, num_steps=3, accumulation=2)

    got = run_training(model, replace(ZERO3, secondary=True, **asked), batches, num_nodes=2)

    assert_same(got, reference(model, ZERO3, batches, num_nodes=2))


def test_loaded_weights_are_used_in_the_next_forward() -> None:
    """A copy that outlives a load computes with what was there before (DeepSpeed #7606)."""
    other, batches = small_llama(), batches_of(4, num_steps=1, accumulation=1)
    models = [copy.deepcopy(other) for _ in range(4)]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    loaded = dict(other.named_parameters())

    def run_rank(groups: TrainGroups) -> Run:
        own = models[groups.main.rank]
        with open_engine(own, groups, replace(ZERO3, secondary=True)) as engine:
            train(engine, own, batches, groups.main.rank)
            engine.load_full(lambda name: loaded[name].data)
            return train(engine, own, batches, groups.main.rank)

    runs = run_groups(in_process_train_groups(4, num_nodes=2), run_rank)

    assert [run.losses for run in runs] == [run.losses for run in reference(other, ZERO3, batches)]


@pytest.mark.parametrize(("world_size", "num_nodes"), [(3, 3), (6, 3), (6, 2), (2, 1)])
def test_any_number_of_nodes_and_ranks(world_size: int, num_nodes: int) -> None:
    """Others fail on odd numbers of nodes, or go another way without a word (DeepSpeed #5054)."""
    model, batches = small_llama(num_hidden_layers=3), batches_of(world_size, num_steps=2, accumulation=1)

    got = run_training(model, replace(BY_NODE, secondary=num_nodes > 1), batches, num_nodes)

    # Sums inside nodes come first, as they do where weights are cut inside nodes only.
    assert_same(got, reference(model, replace(ZERO3, sharding=SHARDINGS["hybrid"]), batches, num_nodes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_gradients_are_a_mean_over_all_ranks(dtype: torch.dtype) -> None:
    """Not over nodes only, and for every shape alike; norms and biases are not quantized at all (DeepSpeed's qgZ)."""
    model, batches = small_llama(), batches_of(4, num_steps=1, accumulation=1)
    exact = run_training(model, BY_NODE, batches, num_nodes=2)[0].gradients[0]
    coded = replace(BY_NODE, reduce_codec="int8", reduce_across_codec="int8-g32", reduce_dtype=dtype)

    got = run_training(model, coded, batches, num_nodes=2)[0].gradients[0]

    for name, want in exact.items():
        scale = float((got[name] * want).sum() / want.square().sum())
        assert abs(scale - 1) < 0.02, f"{name}: {scale}"
        if want.dim() == 1 and dtype == torch.float32:
            assert torch.equal(got[name], want), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_are_decoded_main_shards(dtype: torch.dtype) -> None:
    """In bfloat16 too (DeepSpeed #3992, #4852); norms and biases as they are."""
    codec, seen = parse_codec("int8"), {}
    model = small_llama()
    whole = {flat_param.name: flat_param for flat_param in plan_buckets(model, 4).flat_params}
    given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    models = [copy.deepcopy(model) for _ in range(4)]

    def run_rank(groups: TrainGroups) -> None:
        own = models[groups.main.rank]
        layer = own.get_submodule("model.layers.2")

        def look(module: Any, *_: object) -> None:
            seen[groups.main.rank] = module.mlp.up_proj.weight.clone(), module.input_layernorm.weight.clone()

        options = replace(ZERO3, gather_codec="int8", compute_dtype=dtype, secondary=True)
        with open_engine(own, groups, options) as engine, engine.evaluation():
            own.get_submodule("model.layers.2.mlp").register_forward_hook(lambda *_: look(layer))
            for _ in range(2):  # across nodes, then from the node's copy
                own(input_ids=torch.zeros(1, 3, dtype=torch.int64))
                check(*seen[groups.main.rank])

    def check(matrix: Tensor, norm: Tensor) -> None:
        flat_param = whole["blocks.2"]
        main_N = torch.zeros(flat_param.num_elems)
        for param in flat_param.params:
            param.of(main_N).copy_(given[param.name])
        param = next(param for param in flat_param.params if param.name.endswith("up_proj.weight"))
        want = codec.decode(codec.encode(main_N), flat_param.num_elems, dtype)
        assert torch.equal(matrix, param.of(want))
        assert torch.equal(norm, given["model.layers.2.input_layernorm.weight"].to(dtype))

    run_groups(in_process_train_groups(4, num_nodes=2), run_rank)


def test_weights_are_encoded_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often they are gathered."""
    encoded: list[int] = []
    encode = Codec.encode

    def count(self: Codec, x_N: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.exact and x_N.numel() > 1000:
            encoded.append(x_N.numel())
        return encode(self, x_N, out)

    model, batches = small_llama(), batches_of(2, num_steps=2, accumulation=3)
    num_coded = len([bucket for bucket in plan_buckets(model, 2).buckets if bucket.name != NORMS])
    run_training(model, replace(ZERO3, gather_codec="int8"), batches_of(2, 1, 1))  # codecs are prepared and compiled
    monkeypatch.setattr(Codec, "encode", count)
    monkeypatch.setattr("tightwire.training.engine.engine.prepare_codecs", lambda *_: None)

    run_training(model, replace(ZERO3, gather_codec="int8"), batches)

    assert len(encoded) == 2 * 2 * num_coded  # ranks, steps


def test_zero_pp_learns_as_the_exact_engine() -> None:
    model, batches = small_llama(), batches_of(4, num_steps=10, accumulation=1)[:1].expand(12, -1, -1, -1, -1)
    zero_pp = replace(BY_NODE, gather_codec="int8", secondary=True, reduce_codec="int4", reduce_across_codec="int4")

    exact, coded = run_training(model, ZERO3, batches, 2), run_training(model, zero_pp, batches, 2)

    assert coded[0].losses[-1] < 0.7 * coded[0].losses[0]
    assert coded[0].losses[-1] == pytest.approx(exact[0].losses[-1], rel=0.05)
