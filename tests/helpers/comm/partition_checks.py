"""What partitioned layers are held against in tests: logits of weights that a replica has by itself, and sums of bytes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import harness
import torch
from helpers.comm.partition_bodies import Done, Work, World, compute, expect

from tightwire.comm.group.group import in_process_groups
from tightwire.comm.group.partition_groups import PartitionPlace, in_process_partition
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.weights.formats import choose_formats
from tightwire.model.weights.image import Image
from tightwire.model.weights.image_reader import CheckpointImages, ImageReader, PreparedImages
from tightwire.model.weights.partition_cut import Cut
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, FILES, FIRST_TOUCH, WeightPlan, spread
from tightwire.model.weights.weight_codecs import WEIGHT_CODECS

NUM_LAYERS = 6
PROMPTS = (tuple(range(3, 40)), (7, 8, 9), tuple(range(100, 150)), (5, 4))


def plan_for(world: World, origin: str = FILES, codec: str = "none", num_streamed: int = NUM_LAYERS) -> WeightPlan:
    return WeightPlan(
        source="partition",
        origin=origin,
        codec=codec,
        streamed=spread(NUM_LAYERS, num_streamed),
        num_nodes=world.num_nodes,
        ranks_per_node=world.dp // world.num_nodes,
    )


def beside(plan: WeightPlan) -> WeightPlan:
    """The plan of a rank that has the same layers by itself; all resident where that comes to the same."""
    if plan.codec == "none":
        return EVERYTHING_RESIDENT
    return WeightPlan(source="stream", origin="host", codec=plan.codec, streamed=plan.streamed)


def first_touch_bytes(reader: ImageReader, plan: WeightPlan, at: PartitionPlace) -> int:
    """What the rank ``at`` its place sends to other nodes while it loads, exactly (``partition_cut`` has the formulas)."""
    if plan.origin != FIRST_TOUCH:
        return 0
    in_units = set(plan.streamed if reader.parts is not None else ())
    wholes = [reader.outer, *(image for layer, image in enumerate(reader.stored) if layer not in in_units)]
    sent = sum(Cut(reader.stored[layer].num_bytes, at.num_nodes, at.per_node).unit_bytes for layer in in_units)
    return (at.num_nodes - 1) * (sent + sum(image.num_bytes for image in wholes[at.index :: at.num_ranks]))


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
    """What passed inside each node in every pass, and between nodes at first touch."""
    plan = work.plan
    to_pass = 0
    for rank, own in enumerate(done):
        at = world.place(rank)
        reader = open_images(work, at.shard, world.tp)
        reader.close()
        if at.per_node > 1:
            label = "direct" if plan.codec == "none" else WEIGHT_CODECS[plan.codec]
            sent = [count[2:] for count in own.counts if count[:2] == ("all_gather", label)]
            assert sent == [
                tuple(pass_bytes(each, at, plan, own.num_gathered) for each in (reader.stored, reader.plain))
            ]
        assert own.across_bytes == first_touch_bytes(reader, plan, at)
        if at.index == 0:
            to_pass += sum(image.num_bytes for image in (reader.outer, *reader.stored))
            if reader.parts is not None:
                cuts = [Cut(reader.stored[layer].num_bytes, at.num_nodes, at.per_node) for layer in plan.streamed]
                to_pass -= sum(cut.num_bytes - cut.tail_start for cut in cuts)
    passed = sum(own.across_bytes for own in done)
    assert passed == (to_pass * (world.num_nodes - 1) if plan.origin == FIRST_TOUCH else 0)


def open_images(work: Work, shard: int, tp: int) -> ImageReader:
    checkpoint = open_checkpoint(work.location)
    if checkpoint.prepared is not None:
        return PreparedImages(checkpoint.prepared, shard, work.plan)
    config, reader = checkpoint.config, checkpoint.reader()
    formats = choose_formats(reader, config, work.quantization)
    dtype = getattr(torch, work.dtype)
    return CheckpointImages(reader, config, make_layout(config, tp).shards[shard], work.plan, dtype, formats)


def pass_bytes(images: Sequence[Image], at: PartitionPlace, plan: WeightPlan, num_gathered: int) -> int:
    """That a rank sends inside its node for its first so many layers."""
    each = [Cut(images[layer].num_bytes, at.num_nodes, at.per_node).pass_bytes for layer in plan.streamed]
    passes, more = divmod(num_gathered, len(each))
    return passes * sum(each) + sum(each[:more])
