"""However a model is sharded, what it learns is what plain torch makes of the same batches, to the bit."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from helpers.model.small_llama import small_llama
from helpers.training.training_ranks import Run, assert_same, batches_of, reference, run_training

from tightwire.training.config.sharding import SHARDINGS
from tightwire.training.engine.options import EngineOptions

ZERO3 = EngineOptions()
FROZEN = ("model.embed_tokens", "model.layers.0", "model.layers.2.mlp", "model.layers.3.input_layernorm")


_NUM_STEPS = 5


@cache
def many_steps(world_size: int, num_nodes: int, sharding: str) -> list[Run]:
    options = replace(ZERO3, sharding=SHARDINGS[sharding])
    return reference(small_llama(), options, batches_of(world_size, _NUM_STEPS, 1), num_nodes)


@pytest.mark.parametrize("world_size", [1, 4])  # the cases below have two
@pytest.mark.parametrize("name", SHARDINGS)
def test_many_steps_equal_those_of_one_model(name: str, world_size: int) -> None:
    num_nodes = 2 if world_size == 4 else 1

    got = run_training(
        small_llama(),
        replace(ZERO3, sharding=SHARDINGS[name]),
        batches_of(world_size, num_steps=_NUM_STEPS, accumulation=1),
        num_nodes,
    )

    # Without accumulation only hybrid adds in another order.
    assert_same(got, many_steps(world_size, num_nodes, "hybrid" if name == "hybrid" else "none"))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "checkpointed": ({}, {"checkpoint_blocks": 9}),
    "two-checkpointed": ({"tie_word_embeddings": True}, {"checkpoint_blocks": 2}),
    "frozen": ({"frozen": FROZEN}, {}),
    "frozen-checkpointed": ({"frozen": FROZEN}, {"checkpoint_blocks": 4, "num_buffers": 3}),
    "only-norms": (
        {"frozen": ("model.embed", "lm_head", *(f"model.layers.{i}.{m}" for i in range(4) for m in ("mlp", "self")))},
        {},
    ),
    "implicit": ({}, {"prefetch": "implicit"}),
    "ahead-forward": ({"tie_word_embeddings": True}, {"prefetch": "forward"}),
    "ahead-backward": ({}, {"prefetch": "backward"}),
    "one-buffer": ({}, {"num_buffers": 1}),
    "all-in-buffers": ({}, {"num_buffers": 4}),
    "more-buffers-than-blocks": ({}, {"num_buffers": 6}),
    "one-block": ({"num_hidden_layers": 1}, {}),
    "ends-share": ({}, {"reshard_ends": True}),
    "ends-share-on-demand": ({"frozen": FROZEN}, {"reshard_ends": True, "prefetch": "implicit"}),
    "ends-share-ahead-backward": ({}, {"reshard_ends": True, "prefetch": "backward"}),
    "ends-share-ahead-forward": ({}, {"reshard_ends": True, "prefetch": "forward"}),
    "ends-share-one-block": ({"num_hidden_layers": 1}, {"reshard_ends": True}),
}


_BATCHES = batches_of(2, num_steps=2, accumulation=3)


@cache
def accumulated(of_model: tuple[tuple[str, Any], ...], sharding: str, reshard_ends: bool, num_nodes: int) -> list[Run]:
    """What cases have in common whose options leave the order of additions as it is."""
    options = replace(ZERO3, sharding=SHARDINGS[sharding], reshard_ends=reshard_ends)
    return reference(small_llama(**dict(of_model)), options, _BATCHES, num_nodes)


# What whole weights do with gradients is one of two things, whatever the case.
WITH_WHOLE_WEIGHTS = ("accumulation", "tied", "frozen-checkpointed")


@pytest.mark.parametrize(
    ("case", "sharding"),
    [(c, s) for c in CASES for s in SHARDINGS if not SHARDINGS[s].keep_weights or c in WITH_WHOLE_WEIGHTS],
)
def test_other_options_equal_one_model(case: str, sharding: str) -> None:
    of_model, of_engine = CASES[case]
    options, num_nodes = replace(ZERO3, sharding=SHARDINGS[sharding], **of_engine), 2 if sharding == "hybrid" else 1

    got = run_training(small_llama(**of_model), options, _BATCHES, num_nodes)

    assert_same(got, accumulated(tuple(of_model.items()), sharding, options.reshard_ends, num_nodes))


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3", "hybrid"])
@pytest.mark.parametrize("per_bucket", [2, 3])
def test_buckets_of_several_blocks_equal_one_model(per_bucket: int, sharding: str) -> None:
    frozen = FROZEN if per_bucket == 3 else ()  # the first of three blocks is
    options = replace(ZERO3, sharding=SHARDINGS[sharding], checkpoint_blocks=1, num_buffers=per_bucket - 1)
    model, batches, num_nodes = small_llama(frozen=frozen), batches_of(2, 2, 2), 2 if sharding == "hybrid" else 1

    got = run_training(model, options, batches, num_nodes, per_bucket)

    assert_same(got, reference(model, options, batches, num_nodes))
