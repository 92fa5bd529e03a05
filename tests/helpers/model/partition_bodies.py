"""Replicas with partitioned layers, and the work of their ranks in tests. Importable by rank processes.

Every replica makes the same passes: a prompt of its own, then a generated token on replica 0 while the others have nothing to
compute, then one on each.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from helpers.comm.fixed_policy import fixed_policy, make_arms
from helpers.model.whole_logits import whole_logits
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tightwire.bench.stream.order import OrderCheck
from tightwire.comm.group.group import Group, open_process_group
from tightwire.comm.group.nodes import PartitionPeers, PartitionPlace, join_partition
from tightwire.comm.group.topology import Topology
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan, make_plan
from tightwire.model.weights import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.formats import choose_formats, split_model
from tightwire.model.weights.streamed import StreamedWeights

_BLOCK_SIZE, _NUM_BLOCKS = 16, 8
_WALK: list[int] = []


@dataclass(frozen=True)
class World:
    """tp x dp ranks on some nodes, and where they meet. ``store``: a path. ``segments``: of each node's ranks of a shard, at node * tp + shard."""

    tp: int
    dp: int
    num_nodes: int = 1
    store: str = ""
    segments: tuple[str, ...] = ()
    timeout_s: float = 120.0
    interface: str | None = None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp

    def place(self, rank: int) -> PartitionPlace:
        return PartitionPlace(self.tp, Topology(rank, self.num_ranks, num_nodes=self.num_nodes))

    def __str__(self) -> str:
        nodes = f"-on-{self.num_nodes}-nodes" if self.num_nodes > 1 else ""
        return f"tp-{self.tp}-dp-{self.dp}{nodes}"


@dataclass(frozen=True)
class Work:
    """What all ranks load and compute. ``prompts``: of each replica."""

    location: str
    plan: WeightPlan
    prompts: tuple[tuple[int, ...], ...]
    quantization: str = "auto"
    dtype: str = "float32"


@dataclass
class Done:
    """The result on one rank: logits of each pass with something to compute, on its replica's first rank."""

    logits: list[Tensor] = field(default_factory=list)
    num_gathered: int = 0  # layers
    counts: list[tuple[str, str, int, int]] = field(default_factory=list)  # op, algorithm, bytes, bytes if exact


def open_replica(world: World, rank: int) -> Group:
    """The group of the rank's replica."""
    replica, shard = divmod(rank, world.tp)
    return open_process_group(
        Topology(shard, world.tp),
        store=FileStore(f"{world.store}-{replica}", world.tp),
        device=torch.device("cpu"),
        timeout_s=world.timeout_s,
        name=f"replica-{replica}",
        interface=world.interface,
    )


def open_peers(world: World, rank: int) -> PartitionPeers:
    at = world.place(rank)
    return join_partition(
        at,
        store=FileStore(f"{world.store}-peers", world.num_ranks),
        device=torch.device("cpu"),
        timeout_s=world.timeout_s,
        interface=world.interface,
        segment_fd=os.open(world.segments[at.topology.node * at.tp + at.shard], os.O_RDWR) if world.segments else None,
    )


def build(replica: Group, peers: PartitionPeers | None, work: Work) -> ModelRunner:
    checkpoint = open_checkpoint(work.location)
    prepared = checkpoint.prepared
    config = checkpoint.config
    formats = prepared.formats if prepared else choose_formats(checkpoint.reader(), config, work.quantization)
    return build_runner(
        config,
        prepared or checkpoint.reader(),
        split_model(config, formats, replica.world_size),
        RankGroups(
            replica,
            routes=make_arms({"fixed": fixed_policy("one-shot")}, replica) if replica.world_size > 1 else None,
            peers=peers,
        ),
        RunnerOptions(
            dtype=getattr(torch, work.dtype),
            max_model_len=_BLOCK_SIZE * _NUM_BLOCKS,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            formats=formats,
            weight_plan=work.plan,
        ),
    )


def run_passes(runner: ModelRunner, replica: int, prompt: Sequence[int]) -> list[Tensor]:
    """The passes of this rank; logits on the first rank of its replica."""
    logits: list[Tensor] = []
    context = 0
    for tokens in (list(prompt), [11] if replica == 0 else _WALK, [12]):
        if tokens:
            context += len(tokens)
            made = whole_logits(runner, _plan(tokens, context))
            if made is not None:
                logits.append(made)
        else:
            walk(runner)
    return logits


def walk(runner: ModelRunner) -> None:
    """A pass with nothing to compute."""
    for span in runner.weights.spans:
        for layer in span:
            runner.weights.layer(layer)
            runner.weights.release(layer)


def compute(replica: Group, peers: PartitionPeers, work: Work, rank: int) -> Done:
    """Load, make the passes, end."""
    runner = build(replica, peers, work)
    done = Done()
    try:
        number = rank // replica.world_size
        done.logits = run_passes(runner, number, work.prompts[number])
        weights = runner.weights
        assert isinstance(weights, StreamedWeights)
        done.num_gathered = settle(weights)
        done.counts = [
            (count.op, count.algorithm, count.bytes_sent, count.exact_bytes)
            for count in peers.inside.ledger.counters.counts()
        ]
        peers.await_all()  # who ends first would be missed by those that still fetch
        return done
    finally:
        runner.close()
        replica.close()


def settle(weights: StreamedWeights) -> int:
    """Wait until the buffers are full and nothing is under way; how many layers have been gathered. Their order is checked."""
    deadline = time.monotonic() + 30
    while not weights.fetcher.is_full:
        assert weights.pool._closed is None, weights.pool._closed
        assert time.monotonic() < deadline, weights.pool._describe()
        time.sleep(0.001)
    OrderCheck().check([*weights.pool.events])
    gathering = weights.fetcher.read_pool or weights.pool
    OrderCheck().check(gathering.events)
    return sum(event.kind == "filled" for event in gathering.events)


def compute_as_process(group: Group, world: World, work: Work) -> Done | None:
    """``compute`` of one of the harness's ranks; None of one beyond this world."""
    if group.rank >= world.num_ranks:
        return None
    return compute(open_replica(world, group.rank), open_peers(world, group.rank), work, group.rank)


def expect(work: Work, replica_group: Group, plan: WeightPlan = EVERYTHING_RESIDENT) -> list[list[Tensor]]:
    """The logits of every replica's passes, on weights that one rank, or one replica's, have by themselves."""
    alone = Work(work.location, plan, work.prompts, work.quantization, work.dtype)
    results = []
    for number, prompt in enumerate(work.prompts):
        runner = build(replica_group, None, alone)
        try:
            results.append(run_passes(runner, number, prompt))
        finally:
            runner.close()
    return results


def _plan(tokens: Sequence[int], context: int) -> StepPlan:
    generated = context > len(tokens)
    return make_plan(
        token_ids=tokens,
        query_lens=[len(tokens)],
        context_lens=[context],
        block_tables=range(_NUM_BLOCKS),
        num_decode_rows=len(tokens) if generated else 0,
        logit_rows=range(len(tokens)),
    )
