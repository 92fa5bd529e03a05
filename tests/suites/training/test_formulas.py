"""The engine's memory and bytes equal the formulas exactly."""

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.training_ranks import batches_of, open_engine, run_groups, train
from torch import Tensor, nn

from tightwire.comm.transport.in_process import ThreadExchange
from tightwire.training.config.sharding import SHARDINGS
from tightwire.training.engine.costs import Flow, engine_memory, gathers_per_step, step_traffic
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import plan_buckets
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import TrainGroups

BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
CODED = {
    "gather_codec": "int8",
    "reduce_path": "hierarchical",
    "reduce_codec": "int4-g64",
    "reduce_across_codec": "int4-g64",
}
FROZEN = ("model.embed_tokens", "model.layers.0", "model.layers.2.mlp")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in SHARDINGS},
    **{f"{name}-bf16": (name, {}, BF16) for name in ("none", "zero3", "hybrid")},
    "tied-frozen": ("zero3", {"tie_word_embeddings": True, "frozen": FROZEN}, {}),
    "frozen": ("zero3", {"frozen": FROZEN}, {"num_buffers": 3}),
    "frozen-zero2": ("zero2", {"frozen": FROZEN}, {}),
    "flat": ("zero3", {}, {"gather_path": "flat"}),
    "zero++": ("zero3", {}, {**CODED, "secondary": True}),
    "zero++-bf16": ("zero3", {}, {**CODED, **BF16, "secondary": True}),
    "zero++-flat": ("zero3", {"frozen": FROZEN}, {"secondary": True, "gather_path": "flat"}),
    "frozen-int4": ("zero3", {"frozen": FROZEN}, {"frozen_codec": "int4"}),
    "frozen-int4-secondary": ("zero3", {"frozen": FROZEN}, {"frozen_codec": "int4", "secondary": True, **BF16}),
    "frozen-bf16-alone": ("none", {"frozen": FROZEN}, BF16),
    "hybrid-int8": ("hybrid", {}, {"gather_codec": "int8", "reduce_codec": "int8"}),
    "ends-share": ("zero3", {}, {**CODED, "secondary": True, "reshard_ends": True}),
    "ends-share-frozen": ("hybrid", {"frozen": FROZEN}, {"reshard_ends": True, **BF16}),
    "three-per-bucket": ("zero3", {"frozen": FROZEN}, {"num_buffers": 1}),
}


def options_of(case: str) -> tuple[nn.Module, EngineOptions]:
    sharding, of_model, of_engine = CASES[case]
    return small_llama(**of_model), replace(EngineOptions(), sharding=SHARDINGS[sharding], **of_engine)


@pytest.mark.parametrize("case", CASES)
def test_ledgers_and_memory_equal_the_formulas(case: str) -> None:
    model, options = options_of(case)
    accumulation, batches = 2, batches_of(4, num_steps=2, accumulation=2)
    models, per_bucket = [copy.deepcopy(model) for _ in range(4)], 3 if case == "three-per-bucket" else 1

    def run_rank(groups: TrainGroups) -> Any:
        own = models[groups.main.rank].to(options.compute_dtype)
        with open_engine(own, groups, options, per_bucket=per_bucket) as engine:
            allocated = allocated_bytes(engine)
            train(engine, own, batches, groups.main.rank)
            assert allocated_bytes(engine) == allocated, "something was allocated while training"
            return allocated, sent_by(groups), sent_between_nodes(groups)

    results = run_groups(in_process_train_groups(4, num_nodes=2), run_rank)

    ranks = {"num_nodes": 2, "ranks_per_node": 2}
    with torch.device("meta"):
        dry = small_llama(**CASES[case][1])
    plan = plan_buckets(dry, options.sharding.shard_ranks(4, 2), per_bucket=per_bucket)
    flows = [
        flow
        for first in (True, False)
        for flow in step_traffic(plan, options, **ranks, accumulation=accumulation, first=first)
    ]
    memory = engine_memory(plan, options, **ranks)
    for allocated, sent, between in results:
        assert allocated == sum(memory.values())
        assert sent == formula_by_op(flows)
        if options.sharding.shard_over == "world":
            assert between["gather"] == sum_between(flows, "gather") or options.gather_path == "flat"
            assert between["reduce"] == sum_between(flows, "reduce") or options.reduce_path == "flat"


def sent_by(groups: TrainGroups) -> Counter[tuple[str, str]]:
    """Bytes by lane and operation; without those of the sum over replicas."""
    sent: Counter[tuple[str, str]] = Counter()
    for lane, group in (("gather", groups.gather), ("reduce", groups.reduce), ("reduce", groups.main)):
        for count in group.ledger.counters.counts():
            is_summed = group is not groups.main or count.op == "reduce_scatter"  # the second lane of sums over nodes
            if count.bytes_sent and count.op != "all_reduce" and is_summed:
                sent[lane, count.op] += count.bytes_sent
    return sent


def sent_between_nodes(groups: TrainGroups) -> dict[str, int]:
    assert groups.gather.nodes is not None and groups.reduce.nodes is not None and groups.main.nodes is not None
    summed = groups.reduce.nodes.across.bytes_sent + groups.main.nodes.across.bytes_sent
    return {"gather": groups.gather.nodes.across.bytes_sent, "reduce": summed}


def formula_by_op(flows: list[Flow]) -> Counter[tuple[str, str]]:
    sent: Counter[tuple[str, str]] = Counter()
    for flow in flows:
        if flow.calls * flow.bytes_sent:
            sent[flow.lane, flow.op] += flow.calls * flow.bytes_sent
    return sent


def sum_between(flows: list[Flow], lane: str) -> int:
    return sum(flow.calls * flow.bytes_between_nodes for flow in flows if flow.lane == lane)


def allocated_bytes(engine: Engine) -> int:
    """Of all tensors that hang on the engine, each byte once; what the model, groups and a single number take is left out."""
    spans: list[tuple[int, int]] = []
    seen: dict[int, Any] = {}  # kept, so that no two have one id

    def visit(thing: Any) -> None:
        if id(thing) in seen or isinstance(
            thing, (nn.Module, ThreadExchange, TrainGroups, str, int, float, type, EngineOptions)
        ):
            return
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            if thing.numel() > 1:
                spans.append((thing.data_ptr(), thing.data_ptr() + thing.nbytes))
            if isinstance(thing, nn.Parameter) and thing.grad is not None:
                visit(thing.grad)
        elif isinstance(thing, dict):
            for value in thing.values():
                visit(value)
        elif isinstance(thing, (list, tuple, set)):
            for value in thing:
                visit(value)
        elif type(thing).__module__.startswith("tightwire"):
            slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
            visit({name: getattr(thing, name) for name in (*getattr(thing, "__dict__", {}), *slots)})

    visit(engine)
    total = end = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_number_of_gathers_of_all_blocks(num_buffers: int, accumulation: int) -> None:
    total = sum(gathers_per_step(block, 7, num_buffers, 0, accumulation) for block in range(7))

    assert total == 2 * accumulation * (7 - num_buffers) + num_buffers


def test_zero_plus_plus_sends_seven_times_less_than_zero3_between_nodes() -> None:
    """Of blocks, in 16 bits, on two nodes of two ranks; the ledgers are held against the same formula above."""
    zero3 = EngineOptions(**BF16, gather_path="flat")
    zero_pp = replace(
        zero3,
        gather_path="hierarchical",
        gather_codec="int8",
        reduce_path="hierarchical",
        reduce_codec="int4",
        reduce_across_codec="int4",
        secondary=True,
    )
    plan = plan_buckets(small_llama(num_hidden_layers=16), 4)

    def between_nodes(options: EngineOptions) -> int:
        flows = step_traffic(plan, options, num_nodes=2, ranks_per_node=2, accumulation=1)
        return sum(flow.calls * flow.bytes_between_nodes for flow in flows if flow.flat_param.startswith("blocks"))

    # A quarter of a unit goes from each rank to both ranks of the other node, or once to the one of its place. Of 16
    # blocks 14 are gathered twice. Codes have four bytes of scale and zero for 128 numbers.
    gathers, num_blocks = 2 * 14 + 2, 16
    flat_param = (gathers + num_blocks) * 2 * 16
    coded = num_blocks * (8 + 32 / 128) + num_blocks * (4 + 32 / 128)
    assert between_nodes(zero3) / between_nodes(zero_pp) == flat_param / coded == 7.36
