"""Where parameters lie in units: each once, aligned, in places that do not depend on the number of ranks."""

import pytest
import torch
from helpers.model.small_llama import NUM_BLOCKS, small_llama
from torch import nn

from tightwire.training.engine.units import ALIGN_ELEMS, SHARD_MULTIPLE, copy_into_shard, cut, plan_units


@pytest.mark.parametrize("shard_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_one_place(shard_ranks: int, tied: bool) -> None:
    model = small_llama(tie_word_embeddings=tied, frozen=("model.layers.1", "model.layers.2.mlp"))

    plan = plan_units(model, shard_ranks)

    names = ["embedding", *(f"blocks.{i}" for i in range(NUM_BLOCKS)), *([] if tied else ["head"]), "norms"]
    assert [unit.name for unit in plan.units] == names
    assert [flat.name for flat in plan.blocks[2].flats] == ["blocks.2", "blocks.2.frozen"]
    assert plan.blocks[1].trainable is None
    parts = {part.name: (flat, part) for flat in plan.flats for part in flat.parts}
    assert parts.keys() == dict(model.named_parameters()).keys()
    assert plan.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        flat, part = parts[name]
        assert part.shape == tuple(parameter.shape)
        assert part.start % ALIGN_ELEMS == 0
        assert flat.trainable == parameter.requires_grad
        assert (parameter.dim() == 1) == flat.name.startswith("norms")
    for flat in plan.flats:
        assert flat.num_elems % (shard_ranks * SHARD_MULTIPLE) == 0
        ends = [part.start + part.num_elems for part in flat.parts]
        assert all(end <= part.start for end, part in zip(ends, flat.parts[1:], strict=False))
        assert 0 <= flat.num_elems - ends[-1] < shard_ranks * SHARD_MULTIPLE + ALIGN_ELEMS


def test_places_do_not_depend_on_the_number_of_ranks() -> None:
    model = small_llama()

    places = [[flat.parts for flat in plan_units(model, ranks).flats] for ranks in (1, 4, 7)]

    assert places[0] == places[1] == places[2]


def test_a_tied_parameter_has_both_its_modules() -> None:
    plan = plan_units(small_llama(tie_word_embeddings=True), 2)

    assert [use.module for use in plan.uses if use.unit.name == "embedding"] == ["model.embed_tokens", "lm_head"]


def test_the_plan_of_a_model_without_memory_is_the_same() -> None:
    with torch.device("meta"):
        dry = small_llama()

    assert plan_units(dry, 4) == plan_units(small_llama(), 4)


def test_shards_put_together_are_the_parameters() -> None:
    model = small_llama()
    flat = plan_units(model, 3).units[1].flats[0]
    shards = torch.zeros(3, flat.num_elems // 3)

    for rank in range(3):
        shard = cut(flat, rank, 3)
        assert [piece.part for piece in shard.pieces] == list(flat.parts)
        copy_into_shard(lambda name: model.get_parameter(name).data, shard, shards[rank])

    for part in flat.parts:
        assert torch.equal(part.of(shards.view(-1)), model.get_parameter(part.name))


def test_a_matrix_outside_of_all_units_is_named() -> None:
    model = small_llama()
    model.extra = nn.Linear(2, 3, bias=False)

    with pytest.raises(ValueError, match=r"parameter extra.weight \(3, 2\) is in none of the embedding, the blocks"):
        plan_units(model, 1)
