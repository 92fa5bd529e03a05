"""Rows of the table: memory from the tensors' sizes, division of stages, and the choice."""

from dataclasses import replace
from typing import Any

import pytest

from tightwire.comm.link.probe import PairFacts
from tightwire.comm.link.wire import network_facts
from tightwire.comm.policy.schedule import HostRates
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.layout import make_layout
from tightwire.model.weights.formats import WeightFormats
from tightwire.server.config.flags import make_config
from tightwire.server.config.serve import EngineOptions
from tightwire.server.hosts.launcher import planned_hosts
from tightwire.server.plan.comm_decision import decide_sums
from tightwire.server.plan.layout_table import Row, choose_layout, compare_layouts, host_bytes, memory_inputs, work_of
from tightwire.server.plan.rank_bytes import SHARED_RUNTIME_BYTES, MemoryInputs

MODEL = LlamaConfig(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_size=14336,
    vocab_size=128_256,
    max_positions=8192,
)
HOST = HostRates(read=50e9, few_flops=600e9, many_flops=1e12, attention_flops=1e12)
GIB = 1 << 30


def inputs(num: int) -> MemoryInputs:
    return MemoryInputs(
        model=MODEL,
        layout=make_layout(MODEL, num),
        options=EngineOptions(),
        pools=(),
        dtype="bfloat16",
        formats=WeightFormats(),
        device="cpu",
    )


def rows(num: int = 2, mbit: float = 1000, latency_s: float = 50e-6, room: float = 0, **others: Any) -> list[Row]:
    link = network_facts([PairFacts((0, 1), 2 * latency_s, 0.0, mbit * 1e6 / 8)])
    rates = others.pop("rates", [HOST] * num)
    options = {"model": "random:tiny", "device": "cpu", "tp": num, "allreduce_extra": ("flash-int8",)}
    config = planned_hosts(make_config(options | others), num)
    asked = decide_sums(config, MODEL, link)
    own = memory_inputs(config, MODEL, WeightFormats(), asked.decided)
    return compare_layouts(asked, own, link, rates, [int(room * GIB)] * num if room else (), config.parallel.tp_split)


def test_table_has_one_row_for_each_layout_and_all_reduce() -> None:
    assert [row.name for row in rows()] == [
        "one host",
        "tensor, auto",
        "tensor, flash-int8",
        "hybrid, auto",
        "pipeline",
    ]


@pytest.mark.parametrize("num", [2, 4])
def test_hosts_hold_their_part_of_the_weights(num: int) -> None:
    """Without caches and outer tensors: 1/N, 1/N, and 2/N - 1/N^2 with the shards' columns kept twice; buffers are larger where heads are whole."""
    model = replace(MODEL, vocab_size=64 * num)
    small = replace(inputs(num), model=model, layout=make_layout(model, num))
    stages = tuple((32 // num * stage, 32 // num * (stage + 1)) for stage in range(num))
    weights = 32 * MODEL.layer_matrix_elems * 2
    base = host_bytes(small, "tensor", (), 0, num)[-1] - weights / num
    hybrid, pipeline = (
        (host_bytes(small, name, stages, 0, num)[-1] - base) / weights for name in ("hybrid", "pipeline")
    )
    by_columns = (MODEL.hidden_size * (4096 + 14336)) / MODEL.layer_matrix_elems  # of o_proj and down_proj
    assert pipeline == pytest.approx(1 / num, rel=0.02)
    assert hybrid == pytest.approx(2 / num - 1 / num**2 + by_columns / num**2, rel=0.02)


def test_ranks_of_a_host_count_once_what_they_share() -> None:
    each, both = (host_bytes(inputs(4), "tensor", (), 0, num) for num in (4, 2))
    assert both == [sum(each[:2]) - SHARED_RUNTIME_BYTES, sum(each[2:]) - SHARED_RUNTIME_BYTES]


def test_cache_of_a_pipeline_is_that_of_its_layers() -> None:
    layouts = (("tensor", ()), ("pipeline", ((0, 24), (24, 32))))
    more = [host_bytes(inputs(2), *layout, 8192, 2)[0] - host_bytes(inputs(2), *layout, 0, 2)[0] for layout in layouts]
    whole = 8192 * 32 * 2 * 8 * 128 * 2
    assert more == [whole / 2, whole * 24 / 32]


def test_last_stage_of_a_pipeline_has_fewer_layers_for_the_head() -> None:
    (first, last) = rows()[-1].stages
    assert first[1] - first[0] > last[1] - last[0]
    assert rows()[-2].stages == ((0, 16), (16, 32))


def test_stated_shares_divide_stages_too() -> None:
    assert rows(tp_split=(3.0, 1.0))[-2].stages == ((0, 24), (24, 32))


def test_stages_of_slower_hosts_are_shorter() -> None:
    slower = HostRates(*(rate / 3 for rate in (50e9, 600e9, 1e12, 1e12)))
    found = rows(rates=[HOST, slower])
    assert found[-2].stages == ((0, 24), (24, 32))


def test_memory_moves_layers_of_a_pipeline_and_ends_layouts() -> None:
    alone, tensor, _, hybrid, pipeline = rows(room=11)
    assert not alone.fits and tensor.fits and not hybrid.fits and pipeline.fits
    assert rows(room=5)[-1].times.layout == "pipeline" and not rows(room=5)[-1].fits


def test_a_limit_that_the_fastest_stages_keep_changes_nothing() -> None:
    free = rows()[-1]
    assert rows(room=(max(free.host_bytes) + 1) / GIB)[-1].stages == free.stages
    less = rows(room=max(free.host_bytes) / GIB - 0.2)[-1]
    assert less.fits and less.stages != free.stages and less.times.crowd_tokens_per_s < free.times.crowd_tokens_per_s


def test_cables_take_hybrid_and_long_ways_take_a_pipeline() -> None:
    best, why = choose_layout(rows(mbit=100, latency_s=100e-6))
    assert best.times.layout == "hybrid"
    assert " s for 512 prompt tokens and 128 more (" in why and "pipeline" in why and "tensor" in why
    assert choose_layout(rows(latency_s=5e-3))[0].times.layout == "pipeline"


def test_choice_is_among_those_that_fit() -> None:
    best, why = choose_layout(rows(mbit=100, room=11))
    assert best.fits and best.times.layout == "tensor" or best.times.layout == "pipeline"
    assert "hybrid does not fit" in why
    with pytest.raises(ValueError, match="no layout fits"):
        choose_layout(rows(room=2))


def test_work_is_that_of_the_matrices() -> None:
    work = work_of(inputs(2))
    assert work.layer_flops == 2 * MODEL.layer_matrix_elems
    assert work.layer_bytes == pytest.approx(2 * MODEL.layer_matrix_elems, rel=0.001)
    assert work.head_bytes == 2 * 128_256 * 4096
