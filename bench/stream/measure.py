"""What a rank of ``bench stream`` does: one arm after the other, each beside resident weights, in random turns.

Four kinds of passes: ``compute``, a step with resident weights; ``raw``, the source by itself (``raw_source``); ``fetch``, every
streamed layer waited for and given back at once, so all of its way but no computing; ``step``, a step with streamed weights. They take turns in short blocks, so that a
machine's drift meets all alike. Before a block the buffers are full and nothing is under way, and its first pass, which has two
layers for nothing, is not timed.

Nothing is timed that was not checked: greedy tokens are told for a comparison with resident weights', and the whole trace of
the buffers must keep their order.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import torch

from tightwire.bench.replicas import ReplicaPlan, join_replica
from tightwire.bench.stream.cells import SOURCES, Arm
from tightwire.bench.stream.events import PROBE, Answered, Probed, Timed
from tightwire.bench.stream.options import StreamBenchOptions
from tightwire.bench.stream.rank import Rank
from tightwire.bench.stream.raw_source import RawPass, raw_copies, raw_gathers, raw_reads
from tightwire.bench.stream.steps import greedy_tokens
from tightwire.bench.stream.turns import Turns
from tightwire.comm.group.group import Group
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.prepared.blob_file import BlobFile, reads_direct
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.ranks.cores import bind_to_cores

_PROBES = 3
_PROMPT, _GREEDY_TOKENS = range(3, 15), 12


def measure(
    group: Group, options: StreamBenchOptions, location: str, folders: Mapping[str, str]
) -> Iterator[Probed | Answered | Timed]:
    """All arms whose ranks need no others. ``folders``: prepared ones by codec, for the sources that are such."""
    settle(group, options)
    rank = Rank(group, options, open_checkpoint(location, options.seed))
    beside = _Resident(rank)
    yield beside.probe()
    for arm in options.arms:
        if arm.is_shared:
            continue
        prepared = open_checkpoint(folders[arm.codec]).prepared if SOURCES[arm.source].is_prepared else None
        yield from _measure_arm(rank, arm, beside, prepared, None)


def measure_shared(
    world: Group, replicas: ReplicaPlan, options: StreamBenchOptions, location: str, arm: Arm
) -> Iterator[Probed | Answered | Timed]:
    """An arm whose layers come from the other replicas, on all of their ranks."""
    settle(world, options)
    with join_replica(replicas, world) as (group, peers):
        rank = Rank(group, options, open_checkpoint(location, options.seed), world)
        beside = _Resident(rank)
        yield beside.probe()
        yield from _measure_arm(rank, arm, beside, None, peers)


def settle(world: Group, options: StreamBenchOptions) -> tuple[int, ...]:
    """Compute on as many threads as asked for, on the CPU on cores of this rank's own where a server's ranks have such: a
    thread that gives up its core while it holds the interpreter's lock gives it to another of the same rank, and not to one
    that keeps all of the rank's threads waiting. Returns the cores; none: wherever the kernel puts it."""
    torch.set_num_threads(options.threads)
    return bind_to_cores(world.rank, world.world_size, options.threads) if options.device == "cpu" else ()


class _Resident:
    """Resident weights, which every arm takes turns with."""

    def __init__(self, rank: Rank) -> None:
        self.runner = rank.build(EVERYTHING_RESIDENT)
        self._rank = rank
        self.tokens = greedy_tokens(self.runner, rank.group, _PROMPT, _GREEDY_TOKENS)

    def probe(self) -> Probed:
        step = self._rank.step(PROBE)
        return Probed(seconds=self._rank.passes(lambda: self.runner.execute(step), _PROBES)[0])


def _measure_arm(
    rank: Rank, arm: Arm, beside: _Resident, prepared: Prepared | None, peers: PartitionPeers | None
) -> Iterator[Answered | Timed]:
    direct = prepared is not None and all(map(reads_direct, prepared.paths))
    plan = arm.plan(rank.num_layers, rank.num_streamed, rank.options.dp, "direct" if direct else "buffered")
    runner = rank.build(plan, prepared, peers)
    try:
        tokens = greedy_tokens(runner, rank.group, _PROMPT, _GREEDY_TOKENS)
        io = "" if prepared is None else "direct" if direct else "dropped"
        step_bytes = rank.step_bytes(plan)
        yield Answered(arm=arm, step_bytes=step_bytes, tokens=tokens, resident_tokens=beside.tokens, io=io)
        with ExitStack() as stack:
            file = None if prepared is None else stack.enter_context(_open(prepared.paths[rank.group.rank]))
            raw = _raw_pass(rank, arm, plan, runner, prepared, peers, stack) if arm.has_raw else None
            begin = file.forget if file is not None and not direct else None
            yield from Turns(rank, arm, beside.runner, runner, raw, begin).blocks()
        if peers is not None:
            peers.meet()  # whoever leaves earlier is missed by those who still gather
    finally:
        runner.close()


def _open(path: Path) -> AbstractContextManager[BlobFile]:
    return closing(BlobFile(path, direct=False))


def _raw_pass(
    rank: Rank,
    arm: Arm,
    plan: WeightPlan,
    runner: ModelRunner,
    prepared: Prepared | None,
    peers: PartitionPeers | None,
    stack: ExitStack,
) -> RawPass:
    assert isinstance(runner.weights, StreamedWeights)
    store = runner.weights.store
    if peers is not None:
        return raw_gathers(peers, [store.packed(layer).num_bytes for layer in plan.streamed])
    if prepared is None:
        return raw_copies(store, plan.streamed, rank.group.device)
    own = prepared.manifest.ranks[rank.group.rank].layers
    blobs = [own[layer] for layer in plan.streamed]
    return stack.enter_context(raw_reads(prepared.paths[rank.group.rank], blobs, direct=plan.io == "direct"))
