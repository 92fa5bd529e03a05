"""The layout that is chosen, and the options that hybrid does not work with."""

from typing import Any

import pytest

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.weights.formats import WeightFormats
from tightwire.server.config.flags import make_config
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan import run_plan

MODEL = LlamaConfig(
    num_layers=6,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=160,
    vocab_size=304,
    max_positions=512,
)


def _decide(**options: Any) -> run_plan.Decision:
    config: ServeConfig = make_config({"model": "random:tiny", "device": "cpu", "layout": "hybrid", "tp": 2} | options)
    return run_plan.decide(config, MODEL, WeightFormats())


def test_stages_are_divided_by_the_ranks_shares() -> None:
    plan = _decide(tp_split=(2, 1)).plan
    assert plan.stages is not None and plan.stages.layers == ((0, 4), (4, 6))
    assert plan.policy_names == ("auto", "auto/tensor"), "a request may have its prompt computed by all ranks together"
    assert _decide(layout="auto").plan.stages is None


def test_auto_on_several_hosts_says_where_the_other_layouts_are_predicted() -> None:
    hosts = {"nnodes": 2, "node_rank": 0, "master_addr": "node-0"}
    auto, named = (_decide(layout=layout, **hosts).summary() for layout in ("auto", "tensor"))
    assert "layout: tensor, `tightwire explain random:tiny --hosts 2 --network` predicts the others" in auto
    assert "layout: tensor\n" in f"{named}\n" and "--network" not in named


def test_a_stage_takes_memory_for_its_layers_and_their_kv_heads() -> None:
    tensor, hybrid = _decide(layout="tensor", max_model_len=64), _decide(max_model_len=64)
    for without, rank in zip(tensor.budget.ranks, hybrid.budget.ranks, strict=True):
        assert rank.weights > without.weights
        assert (
            rank.block == without.block + 3 * 2 * 2 * 16 * 16 * 2
        )  # layers, keys and values, heads, size, tokens, bytes
    assert "layout: hybrid: prompts pass the ranks in stages of layers 0 to 2, 3 to 5" in hybrid.summary()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp": 1}, "--tp 1"),
        ({"dp": 2}, "--dp 2"),
        ({"weights": "stream"}, "--weights stream"),
        ({"kv_offload": True}, "--kv-offload"),
        ({"prefix_cache": "all"}, "--prefix-cache all"),
        ({"plan_ahead": "on"}, "--plan-ahead on"),
        ({"lora_dir": "adapters"}, "--lora"),
    ],
)
def test_what_hybrid_does_not_work_with_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"--layout hybrid does not combine with {named}: .*; leave one of them out"):
        _decide(**options)


def test_a_codec_whose_groups_part_rows_is_refused() -> None:
    assert _decide(stage_codec="int8-g64").plan.stage_codec == "int8-g64"
    with pytest.raises(ValueError, match="--stage-codec int8: a row has 64 numbers, which are not whole groups of 128"):
        _decide(stage_codec="int8")
    with pytest.raises(ValueError, match="--stage-codec must be given with --layout hybrid"):
        _decide(layout="auto", stage_codec="int8-g64")
