"""Positions of parameters in flat parameters: each once, aligned, independent of the number of ranks."""

import pytest
import torch
from helpers.model.small_llama import NUM_BLOCKS, small_llama
from torch import nn

from tightwire.training.engine.flat_parameters import (
    ALIGN_ELEMS,
    SHARD_MULTIPLE,
    copy_into_shard,
    cut_shard,
    plan_buckets,
)


@pytest.mark.parametrize("shard_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_one_position(shard_ranks: int, tied: bool) -> None:
    model = small_llama(tie_word_embeddings=tied, frozen=("model.layers.1", "model.layers.2.mlp"))

    plan = plan_buckets(model, shard_ranks)

    names = ["embedding", *(f"blocks.{i}" for i in range(NUM_BLOCKS)), *([] if tied else ["head"]), "norms"]
    assert [bucket.name for bucket in plan.buckets] == names
    assert [flat_param.name for flat_param in plan.blocks[2].flat_params] == ["blocks.2", "blocks.2.frozen"]
    assert plan.blocks[1].trainable is None
    params = {param.name: (flat_param, param) for flat_param in plan.flat_params for param in flat_param.params}
    assert params.keys() == dict(model.named_parameters()).keys()
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        flat_param, param = params[name]
        assert param.shape == tuple(parameter.shape)
        assert param.start % ALIGN_ELEMS == 0
        assert flat_param.trainable == parameter.requires_grad
        assert (parameter.dim() == 1) == flat_param.name.startswith("norms")
    for flat_param in plan.flat_params:
        assert flat_param.num_elems % (shard_ranks * SHARD_MULTIPLE) == 0
        ends = [param.start + param.num_elems for param in flat_param.params]
        assert all(end <= param.start for end, param in zip(ends, flat_param.params[1:], strict=False))
        assert 0 <= flat_param.num_elems - ends[-1] < shard_ranks * SHARD_MULTIPLE + ALIGN_ELEMS


def test_positions_do_not_depend_on_the_number_of_ranks() -> None:
    model = small_llama()

    places = [[flat_param.params for flat_param in plan_buckets(model, ranks).flat_params] for ranks in (1, 4, 7)]

    assert places[0] == places[1] == places[2]


def test_a_tied_parameter_is_used_by_both_modules() -> None:
    plan = plan_buckets(small_llama(tie_word_embeddings=True), 2)

    assert [use.module for use in plan.uses if use.bucket.name == "embedding"] == ["model.embed_tokens", "lm_head"]


def test_the_plan_of_a_meta_model_is_the_same() -> None:
    with torch.device("meta"):
        dry = small_llama()

    assert plan_buckets(dry, 4) == plan_buckets(small_llama(), 4)


def test_joined_shards_are_the_parameters() -> None:
    model = small_llama()
    flat_param = plan_buckets(model, 3).buckets[1].flat_params[0]
    shards = torch.zeros(3, flat_param.num_elems // 3)

    for rank in range(3):
        shard = cut_shard(flat_param, rank, 3)
        assert [span.param for span in shard.spans] == list(flat_param.params)
        copy_into_shard(lambda name: model.get_parameter(name).data, shard, shards[rank])

    for param in flat_param.params:
        assert torch.equal(param.of(shards.view(-1)), model.get_parameter(param.name))


def test_a_matrix_outside_all_buckets_is_named() -> None:
    model = small_llama()
    model.extra = nn.Linear(2, 3, bias=False)

    with pytest.raises(ValueError, match=r"parameter extra.weight \(3, 2\) is in none of the embedding, the blocks"):
        plan_buckets(model, 1)
