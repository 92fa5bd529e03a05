"""The layout that is chosen, and the options that hybrid does not work with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tiny import tiny_config

from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import LinkFacts, network_facts
from tightwire.comm.policy.schedule import HostRates
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.open import open_checkpoint
from tightwire.model.stages import StagePlan
from tightwire.model.weights.formats import WeightFormats, choose_formats
from tightwire.server.config.flags import make_config
from tightwire.server.config.serve import ServeConfig
from tightwire.server.hosts.launcher import resolve_hosts
from tightwire.server.plan import layout_decision, run_plan
from tightwire.server.plan.rank_setup import LayoutChoice

MODEL = config_from_hf(tiny_config(dtype="bfloat16", num_hidden_layers=6))


_REFUSED_BY_STAGES: list[tuple[dict[str, Any], str]] = [
    ({"tp": 1}, "--tp 1"),
    ({"dp": 2}, "--dp 2"),
    ({"weights": "stream"}, "--weights stream"),
    ({"kv_offload": True}, "--kv-offload"),
    ({"plan_ahead": "on"}, "--plan-ahead on"),
]


def _decide(**options: Any) -> run_plan.Decision:
    config: ServeConfig = make_config({"model": "random:tiny", "device": "cpu", "layout": "hybrid", "tp": 2} | options)
    return run_plan.decide(config, MODEL, WeightFormats())


def test_stages_are_divided_by_the_ranks_shares() -> None:
    plan = _decide(tp_split=(2, 1)).plan
    assert plan.stages is not None and plan.stages.layers == ((0, 4), (4, 6))
    assert plan.policy_names == ("auto", "auto/tensor"), "a request may have its prompt computed by all ranks together"
    assert _decide(layout="auto").plan.stages is None


SLOW = network_facts([PairFacts((0, 1), 200e-6, 0.0, 12.5e6)])
HOST = HostRates(read=50e9, few_flops=600e9, many_flops=1e12, attention_flops=1e12)


def _choose(
    monkeypatch: pytest.MonkeyPatch, link: LinkFacts = SLOW, room: Sequence[int] = (), **options: Any
) -> LayoutChoice:
    """The choice between two hosts that compute at ``HOST``'s rates."""
    monkeypatch.setattr(layout_decision, "measure_rates", lambda *_: HOST)
    monkeypatch.setattr(layout_decision, "available_host_bytes", lambda: 64 << 30)
    given = {"nnodes": 2, "node_rank": 0, "master_addr": "node-0", "tp": 2, "device": "cpu"} | options
    config, _ = resolve_hosts(make_config({"model": "random:llama-3.2-1b"} | given), {})
    checkpoint = open_checkpoint(config.model.model, 0)
    formats = choose_formats(checkpoint.reader(), checkpoint.config, "none")
    return layout_decision.choose_auto(config, checkpoint, formats, link, room)


def test_auto_takes_what_answers_soonest(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _choose(monkeypatch)
    assert slow.layout == "hybrid" and " s for 512 prompt tokens and 128 more (pipeline " in slow.why
    fast = network_facts([PairFacts((0, 1), 2e-6, 0.0, 100e9)])
    assert _choose(monkeypatch, fast).layout == "tensor"
    far = network_facts([PairFacts((0, 1), 5e-3, 0.0, 12.5e6)])
    assert _choose(monkeypatch, far).layout == "pipeline"
    assert _choose(monkeypatch, prefix_cache="all").layout == "pipeline", "which hybrid does not work with"


def test_auto_takes_what_fits_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    assert _choose(monkeypatch, room=(16 * gib, 16 * gib)).layout == "hybrid"
    small = _choose(monkeypatch, room=(16 * gib, 2 * gib))
    assert small.layout == "pipeline" and "hybrid does not fit" in small.why
    (_, first), (_, last) = small.layers
    assert first > last - first, "the host with less memory has fewer layers"
    assert _choose(monkeypatch, room=(16 * gib, 16 * gib), device_memory=9 * gib // 4).layout == "pipeline"
    assert _choose(monkeypatch, room=(gib // 8, gib // 8)).why == "no layout fits into the memory of the hosts"


def test_auto_counts_a_host_of_several_ranks_as_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    far, gib = network_facts([PairFacts((0, 1), 5e-3, 0.0, 12.5e6)]), 1 << 30
    chosen = _choose(monkeypatch, far, tp=4)
    assert chosen.layout == "pipeline" and len(chosen.layers) == 2, "a host is a stage"
    slow = _choose(monkeypatch, tp=4)
    assert slow.layout == "hybrid" and len(slow.layers) == 2, "in both layouts"
    fast = network_facts([PairFacts((0, 1), 2e-6, 0.0, 100e9)])
    assert _choose(monkeypatch, fast, tp=4).layout == "tensor"
    (_, first), (_, last) = _choose(monkeypatch, far, (16 * gib, 5 * gib // 2), tp=4).layers
    assert first > last - first, "the host with less memory has fewer layers, and its limit counts once for both ranks"
    (_, first), (_, last) = _choose(monkeypatch, far, tp=4, tp_split=(1, 1, 2, 2)).layers
    assert first < last - first, "a host is as fast as its ranks together"
    config = make_config({"model": "random:tiny", "device": "cpu", "tp": 4, "nodes": 2})
    decision = run_plan.decide(config, MODEL, WeightFormats(), choice=LayoutChoice("pipeline", "1 s", ((0, 4), (4, 6))))
    assert decision.plan.stages == StagePlan(((0, 4), (4, 6)), pipeline=True, ranks_each=2)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_offload": True}, "hybrid does not combine with --kv-offload: a stage has its keys and values in memory"),
        ({"allreduce": "flash-int8"}, "AllReduces are named, and stages sum no prompts"),
        ({"allreduce_extra": ("flash-int8",)}, "AllReduces are named, and stages sum no prompts"),
    ],
)
def test_auto_takes_tensor_and_says_why(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str) -> None:
    assert _choose(monkeypatch, **options) == LayoutChoice("tensor", why)


def test_what_auto_chose_decides_and_is_told() -> None:
    config = make_config({"model": "random:tiny", "device": "cpu", "tp": 2})
    decision = run_plan.decide(config, MODEL, WeightFormats(), choice=LayoutChoice("hybrid", "1 s"))
    assert decision.plan.stages is not None and decision.plan.layout_note.endswith("computed together; chosen: 1 s")
    assert f"layout: {decision.plan.layout_note}" in decision.summary()
    chosen = LayoutChoice("pipeline", "2 s", ((0, 5), (5, 6)))
    decision = run_plan.decide(config, MODEL, WeightFormats(), choice=chosen)
    assert decision.plan.stages is not None and decision.plan.stages.layers == chosen.layers, "the layers that fit"
    assert decision.plan.is_pipeline and decision.plan.layout_note.endswith("nothing is summed; chosen: 2 s")
    alone = run_plan.decide(config, MODEL, WeightFormats())
    assert alone.plan.stages is None and not alone.plan.layout_note and "layout: tensor\n" in f"{alone.summary()}\n"


def test_tensor_takes_the_place_of_a_chosen_hybrid_that_would_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(MODEL, num_layers=24, mlp_size=64_000)
    config = make_config({"model": "random:tiny", "device": "cpu", "tp": 2, "max_model_len": 64})
    needed = [
        run_plan.decide(config, model, WeightFormats(), choice=each).budget
        for each in (None, LayoutChoice("hybrid", ""))
    ]
    tensor, hybrid = (sum(rank.fixed + rank.block * 4 for rank in budget.ranks) for budget in needed)
    monkeypatch.setattr(run_plan, "available_host_bytes", lambda: (tensor + hybrid) // 2)
    decision = run_plan.decide(config, model, WeightFormats(), choice=LayoutChoice("hybrid", "1 s"))
    assert decision.plan.stages is None and not decision.plan.weights.streamed
    assert "hybrid streams no layers, and does not fit into memory without" in decision.plan.layout_note
    with pytest.raises(ValueError, match="--layout hybrid streams no layers, --layout tensor may; not enough memory: "):
        run_plan.decide(
            make_config({"model": "random:tiny", "device": "cpu", "tp": 2, "max_model_len": 64, "layout": "hybrid"}),
            model,
            WeightFormats(),
        )


@pytest.mark.parametrize("layout", ["hybrid", "pipeline"])
@pytest.mark.parametrize(("short", "why"), [("device_memory", ""), ("kv_cache_memory", "holds")])
def test_stages_that_do_not_fit_are_refused_with_the_reason(layout: str, short: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"--layout {layout} streams no layers, .*not enough memory: .*{why}"):
        _decide(**{"layout": layout, "max_model_len": 512, short: 300 << 20 if short == "device_memory" else 1 << 16})


def test_a_host_of_several_plans_for_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage of another host may be larger than this one's memory."""
    hosts = {"nnodes": 2, "master_addr": "node-0", "layout": "pipeline", "device": "cpu", "tp": 2, "max_model_len": 64}
    choice, model = (
        LayoutChoice("pipeline", "1 s", ((0, 5), (5, 6))),
        replace(MODEL, hidden_size=1024, head_dim=256, mlp_size=4096),
    )
    decided = []
    for node, free in enumerate((1 << 30, 420 << 20)):
        monkeypatch.setattr(run_plan, "available_host_bytes", lambda free=free: free)
        config, _ = resolve_hosts(make_config({"model": "random:tiny", "node_rank": node} | hosts), {})
        decided.append(run_plan.decide(config, model, WeightFormats(), choice=choice))
    assert [decision.plan.stages for decision in decided] == [StagePlan(choice.layers, pipeline=True)] * 2
    assert [name for each in decided for name, _ in each.budget.needs()] == [
        "host memory of node 0",
        "host memory of node 1",
    ]
    first, last = (rank.weights for rank in decided[1].budget.ranks)
    assert first > 120 << 20 > last


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
        *_REFUSED_BY_STAGES,
        ({"prefix_cache": "all"}, "--prefix-cache all"),
    ],
)
def test_what_hybrid_does_not_work_with_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"--layout hybrid does not combine with {named}: .*; leave one of them out"):
        _decide(**options)


def test_a_stage_of_a_pipeline_takes_memory_for_its_layers_alone() -> None:
    whole, pipeline = _decide(layout="tensor", tp=1, max_model_len=64), _decide(layout="pipeline", max_model_len=64)
    first, last = pipeline.budget.ranks
    table = MODEL.vocab_size * MODEL.hidden_size * 2
    assert first.weights + last.weights == whole.budget.ranks[0].weights, "nothing is held twice"
    assert pipeline.plan.stages is not None and pipeline.plan.stages.pipeline
    sizes = [len(pipeline.plan.stages.of(stage)) for stage in range(2)]
    assert sizes[0] >= sizes[1], "the head is in the last stage"
    layer = (whole.budget.ranks[0].weights - 2 * table - 2 * MODEL.hidden_size) // MODEL.num_layers
    assert first.weights == sizes[0] * layer + table
    assert [rank.block // size for rank, size in zip((first, last), sizes, strict=True)] == [2 * 2 * 16 * 16 * 2] * 2
    assert first.activations < last.activations, "logits are those of the last stage"
    assert pipeline.comm is None and pipeline.plan.policy_names == ("auto",) and not pipeline.plan.overlap
    assert pipeline.plan.transport == "sockets" and "layout: pipeline: all rows pass" in pipeline.summary()


def test_ranks_of_a_stage_split_its_layers_and_sum_in_memory() -> None:
    alone, several = (_decide(layout="pipeline", tp=tp, stages=2, max_model_len=64) for tp in (2, 4))
    assert several.plan.stages is not None and alone.plan.stages is not None
    assert several.plan.stages == msgspec.structs.replace(alone.plan.stages, ranks_each=2)
    for stage, whole in enumerate(alone.budget.ranks):
        parts = several.budget.ranks[2 * stage : 2 * stage + 2]
        norms = 2 * len(alone.plan.stages.of(stage)) + stage  # on both ranks; the last one is the head's
        assert sum(part.weights for part in parts) == whole.weights + norms * MODEL.hidden_size * 2
        assert [part.block for part in parts] == [whole.block // 2] * 2, "each has one of two KV heads"
        assert all(part.activations < whole.activations for part in parts)
    assert several.comm is not None and several.comm.setting.world_size == 2 and several.comm.setting.num_nodes == 1
    assert several.plan.transport == "shared-memory" and several.plan.sum_dtype == "float32"
    how = "all rows pass stages of 2 ranks with layers 0 to 2, 3 to 5; the ranks of a stage sum in memory"
    assert f"layout: pipeline: {how}" in several.summary()
    named = _decide(layout="pipeline", tp=4, nodes=2, allreduce="two-shot", allreduce_extra=("flash-int8",)).plan
    assert (
        named.policy_names == ("two-shot", "flash-int8") and named.stages is not None and named.stages.ranks_each == 2
    )
    sockets = _decide(layout="pipeline", tp=4, stages=2, transport="sockets").plan
    assert sockets.transport == "sockets" and not sockets.overlap


def test_ranks_of_a_stage_of_hybrid_hold_their_parts_of_its_layers_too() -> None:
    tensor, hybrid = _decide(layout="tensor", tp=4, max_model_len=64), _decide(tp=4, stages=2, max_model_len=64)
    assert hybrid.plan.stages == StagePlan(((0, 3), (3, 6)), ranks_each=2)
    how = "prompts pass stages of 2 ranks with layers 0 to 2, 3 to 5; the ranks of a stage sum in memory"
    assert f"layout: hybrid: {how}; tokens are computed together" in hybrid.summary()
    for without, rank in zip(tensor.budget.ranks, hybrid.budget.ranks, strict=True):
        assert rank.block == without.block + 3 * 2 * 1 * 16 * 16 * 2, "one of two KV heads in three layers"
        assert rank.weights > without.weights
    # Rank 1 has other heads and columns in its stage than its shard: two query heads, a KV head, and 64 of 160 columns.
    added = hybrid.budget.ranks[1].weights - tensor.budget.ranks[1].weights
    assert added == 3 * 2 * 64 * ((2 + 2) * 16 + 2 * 16 + 3 * 64)
    assert [named.name for named in hybrid.plan.inside] == ["auto"] and hybrid.plan.policy_names[0] == "auto"
    assert _decide(tp=4, nodes=2).plan.stages == hybrid.plan.stages, "a node is a stage"
    assert _decide(tp=4).plan.inside == () and tensor.plan.inside == ()
    lossy = _decide(tp=4, nodes=2, allreduce="flash-int8").plan
    assert lossy.inside == hybrid.plan.inside, "sums in memory lose nothing"


def test_shares_of_ranks_divide_layers_and_inside_a_stage_columns() -> None:
    plan = _decide(layout="pipeline", tp=4, stages=2, tp_split=(3, 1, 1, 1))
    assert plan.plan.stages is not None and len(plan.plan.stages.of(0)) == 4, "twice as fast as the other stage"
    assert [len(shard.mlp_columns) for shard in plan.layout.shards] == [128, 32, 96, 64]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"tp": 4, "stages": 3}, r"2 or more, a divisor of --tp \(4\), got 3"),
        ({"tp": 4, "stages": 1}, r"2 or more, a divisor of --tp \(4\), got 1"),
        (
            {"tp": 6, "nodes": 3, "stages": 2},
            "and a multiple of the 3 nodes, because the ranks of a stage share memory, got 2",
        ),
        ({"tp": 4, "link": "1gbit", "stages": 2}, "and a multiple of the 4 nodes"),
        ({"tp": 4, "layout": "hybrid", "stages": 3}, r"2 or more, a divisor of --tp \(4\), got 3"),
        ({"tp": 4, "layout": "auto", "stages": 2}, "left out without --layout hybrid or pipeline, which have stages"),
    ],
)
def test_stages_that_are_not_possible_are_refused(options: dict[str, Any], want: str) -> None:
    with pytest.raises(ValueError, match=f"--stages must be .*{want}"):
        _decide(**({"layout": "pipeline"} | options))


def test_a_tied_table_is_held_by_the_first_and_the_last_stage() -> None:
    tied = replace(MODEL, tied_embeddings=True)
    config = make_config({"model": "random:tiny", "device": "cpu", "layout": "pipeline", "tp": 3})
    ranks = run_plan.decide(config, tied, WeightFormats()).budget.ranks
    alone = run_plan.decide(make_config({"model": "random:tiny", "device": "cpu"}), tied, WeightFormats()).budget.ranks
    table = MODEL.vocab_size * MODEL.hidden_size * 2
    assert sum(rank.weights for rank in ranks) == alone[0].weights + table


def test_shares_of_a_pipeline_are_speeds_and_layers_need_not_be_divisible() -> None:
    plan = _decide(layout="pipeline", tp=3, tp_split=(4, 1, 1)).plan  # three ranks do not divide four heads evenly
    assert plan.stages is not None and len(plan.stages.of(0)) > len(plan.stages.of(2))
    with pytest.raises(ValueError, match="--tp 7: a stage has a layer or more"):
        _decide(layout="pipeline", tp=7)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *_REFUSED_BY_STAGES,
        ({"transport": "shared-memory"}, "--transport shared-memory"),
        ({"allreduce": "ring"}, "--allreduce ring"),
        ({"allreduce_decode": "ring"}, "--allreduce-decode ring"),
        ({"allreduce_extra": ("ring", "native")}, "--allreduce-extra ring,native"),
        ({"overlap": "on"}, "--overlap on"),
    ],
)
def test_what_a_pipeline_does_not_work_with_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"--layout pipeline does not combine with {named}: .*; leave one of them out"):
        _decide(**({"layout": "pipeline"} | options))


def test_a_codec_whose_groups_part_rows_is_refused() -> None:
    assert _decide(stage_codec="int8-g64").plan.stage_codec == "int8-g64"
    with pytest.raises(ValueError, match="--stage-codec int8: a row has 64 numbers, which are not whole groups of 128"):
        _decide(stage_codec="int8")
    with pytest.raises(ValueError, match="--stage-codec must be given with --layout hybrid or pipeline"):
        _decide(layout="auto", stage_codec="int8-g64")
