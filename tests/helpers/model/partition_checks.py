"""Checks of partitioned layers: the logits of weights that each replica has by itself, and the bytes of the formulas."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import harness
import torch
from helpers.comm.in_process_partition import in_process_partition
from helpers.model.partition_bodies import Done, Work, World, compute, expect

from tightwire.comm.group.group import in_process_groups
from tightwire.comm.group.nodes import PartitionPlace
from tightwire.model.open import open_checkpoint
from tightwire.model.weights import EVERYTHING_RESIDENT, WEIGHT_CODECS, WeightPlan
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.model.weights.load import CheckpointStore
from tightwire.model.weights.packed_layer import LayerFiles, PackedLayer
from tightwire.model.weights.partition_store import PartitionCut
from tightwire.server.plan.weight_decision import spread

NUM_LAYERS = 6
PROMPTS = (tuple(range(3, 40)), (7, 8, 9), tuple(range(100, 150)), (5, 4))


def plan_for(world: World, codec: str = "none", num_streamed: int = NUM_LAYERS) -> WeightPlan:
    return WeightPlan(
        source="partition",
        origin="files",
        codec=codec,
        streamed=spread(NUM_LAYERS, num_streamed),
        ranks_per_node=world.dp // world.num_nodes,
    )


def beside(plan: WeightPlan) -> WeightPlan:
    """The plan of a rank that has the same layers by itself; all resident where that comes to the same."""
    if plan.codec == "none":
        return EVERYTHING_RESIDENT
    return WeightPlan(source="stream", origin="host", codec=plan.codec, streamed=plan.streamed)


def run_threads(world: World, work: Work) -> list[Done]:
    """Every rank a thread of this process."""
    replicas = [group for _ in range(world.dp) for group in in_process_groups(world.tp)]
    peers = in_process_partition(world.tp, world.num_ranks, world.num_nodes, world.timeout_s)

    def run(rank: int) -> Done:
        try:
            return compute(replicas[rank], peers[rank], work, rank)
        finally:
            replicas[rank].close()
            peers[rank].close()

    return harness.run_threads([partial(run, rank) for rank in range(world.num_ranks)])


def expected(world: World, work: Work) -> list[list[torch.Tensor]]:
    """Logits of each replica's passes on weights of its own."""
    groups = in_process_groups(world.tp)
    with ThreadPoolExecutor(world.tp) as pool:
        first, *_ = pool.map(lambda group: expect(work, group, beside(work.plan)), groups)
    return first


def check_logits(world: World, work: Work, done: list[Done]) -> None:
    for replica, logits in enumerate(expected(world, work)):
        own = done[replica * world.tp].logits
        assert len(own) == len(logits)
        assert all(torch.equal(got, want) for got, want in zip(own, logits, strict=True)), f"replica {replica}"


def check_bytes(world: World, work: Work, done: list[Done]) -> None:
    """The bytes sent inside each node in every pass are the formula's."""
    plan = work.plan
    for rank, own in enumerate(done):
        at = world.place(rank)
        files = open_files(work, at.shard, world.tp)
        files.close()
        if at.per_node > 1:
            label = "direct" if plan.codec == "none" else WEIGHT_CODECS[plan.codec]
            sent = [count[2:] for count in own.counts if count[:2] == ("all_gather", label)]
            packed = (files.model.stored, files.model.plain)
            assert sent == [tuple(pass_bytes(each, at, plan, own.num_gathered) for each in packed)]


def open_files(work: Work, shard: int, tp: int) -> LayerFiles:
    checkpoint = open_checkpoint(work.location)
    if checkpoint.prepared is not None:
        return checkpoint.prepared.store(shard, work.plan.io)
    config, reader = checkpoint.config, checkpoint.reader()
    formats = choose_formats(reader, config, work.quantization)
    dtype = getattr(torch, work.dtype)
    return CheckpointStore.for_plan(
        reader, config, split_model(config, formats, tp).shards[shard], work.plan, dtype, formats
    )


def pass_bytes(layers: Sequence[PackedLayer], at: PartitionPlace, plan: WeightPlan, num_gathered: int) -> int:
    """Bytes that a rank sends inside its node for its first ``num_gathered`` layers."""
    each = [PartitionCut(layers[layer].num_bytes, at.per_node).pass_bytes for layer in plan.streamed]
    passes, more = divmod(num_gathered, len(each))
    return passes * sum(each) + sum(each[:more])
