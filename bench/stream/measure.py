"""Measures the arms of ``bench stream`` on one rank, each in random turns with resident weights.

There are four kinds of passes: ``compute``, a step with resident weights; ``raw``, the source alone (``raw_source``); ``fetch``,
every streamed layer taken and released at once, without computing; ``step``, a step with streamed weights. They take turns
in short blocks, so that a drift of the machine affects all alike. Before a block the buffers are full; its first pass, which
finds two layers ready, is not timed. Greedy tokens are compared with those of resident weights, and the buffers' whole
trace must keep their order.
"""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import torch

from tightwire.bench.ranks import ReplicaPlan, join_replica
from tightwire.bench.stream.arms import PROBE, SOURCES, Answered, Arm, Event, Load, Probed, Timed, trace_pass
from tightwire.bench.stream.options import ROUNDS, StreamBenchOptions
from tightwire.bench.stream.rank import Rank, greedy_tokens
from tightwire.bench.stream.raw_source import RawPass, raw_copies, raw_gathers, raw_reads
from tightwire.comm.buffers import BufferConflictError, OrderCheck, SlotEvent
from tightwire.comm.group.group import Group
from tightwire.comm.group.partition_groups import PartitionPeers
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.prepared.blob_file import BlobFile, reads_direct
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.plan.devices import bind_to_cores

_IDLE_POLL_S = 0.001
_PROBES = 3
_PROMPT, _GREEDY_TOKENS = range(3, 15), 12


def measure(group: Group, options: StreamBenchOptions, location: str, folders: Mapping[str, str]) -> Iterator[Event]:
    """Measure all arms that need no other replicas. ``folders``: prepared folders by codec."""
    bind_rank(group, options)
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
) -> Iterator[Event]:
    """Measure an arm whose layers come from the other replicas; runs on all their ranks."""
    bind_rank(world, options)
    with join_replica(replicas, world) as (group, peers):
        rank = Rank(group, options, open_checkpoint(location, options.seed), world)
        beside = _Resident(rank)
        yield beside.probe()
        yield from _measure_arm(rank, arm, beside, None, peers)


def bind_rank(world: Group, options: StreamBenchOptions) -> tuple[int, ...]:
    """Set the number of threads and, on the CPU, bind this rank to cores of its own as a server's ranks are.

    Returns the cores; () if it is not bound.
    """
    torch.set_num_threads(options.threads)
    return bind_to_cores(world.rank, world.world_size, options.threads) if options.device == "cpu" else ()


class _Resident:
    """Resident weights, with which every arm takes turns."""

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
            yield from _Turns(rank, arm, beside.runner, runner, raw, begin).blocks()
        if peers is not None:
            peers.await_all()  # a replica that ended earlier would be missing in the others' gathers
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


class _Turns:
    """The passes of one arm on one rank, in blocks of random order."""

    def __init__(
        self,
        rank: Rank,
        arm: Arm,
        resident: ModelRunner,
        streamed: ModelRunner,
        raw: RawPass | None,
        prepare: Callable[[], None] | None,
    ) -> None:
        """``raw``: a pass of the source alone; ``prepare``: runs before each pass, on all ranks."""
        assert isinstance(streamed.weights, StreamedWeights)
        self._rank, self._arm, self._resident, self._streamed = rank, arm, resident, streamed
        self._weights = streamed.weights
        self._raw, self._prepare = raw, prepare
        self._order = arm.plan(rank.num_layers, rank.num_streamed).streamed
        self._check = OrderCheck()

    def blocks(self) -> Iterator[Timed]:
        options = self._rank.options
        turns = [("fetch", None), *((kind, load) for kind in ("compute", "step") for load in options.loads)]
        if self._raw is not None:
            turns.append(("raw", None))
        # The same order on all ranks, because their passes are collective.
        order = random.Random(f"{options.seed}/{self._arm.name}")
        for number in range(ROUNDS):
            order.shuffle(turns)
            count = (options.repeats + number) // ROUNDS
            for kind, load in turns:
                yield self._block(kind, load, count)

    def _block(self, kind: str, load: Load | None, count: int) -> Timed:
        self._await_full()
        seconds, core_s, begins = self._rank.passes(self._pass_of(kind, load), count, self._prepare)
        self._await_full()
        new = list(self._weights.pool.events)
        self._weights.pool.events.clear()  # nothing is in flight, so no event is lost
        traced = kind == "step" and self._rank.group.device.type == "cpu"
        traces = [trace_pass(new, begin, begin + taken) for begin, taken in zip(begins, seconds, strict=True)]
        return Timed(
            arm=self._arm,
            kind=kind,
            load=load,
            seconds=seconds,
            core_s=core_s,
            traces=traces if traced else [],
            disorder=self._disorder(new),
        )

    def _pass_of(self, kind: str, load: Load | None) -> Callable[[], object]:
        if kind == "raw":
            assert self._raw is not None
            return self._raw
        if load is None:
            return self._fetch
        runner, step = self._resident if kind == "compute" else self._streamed, self._rank.step(load)
        return lambda: runner.execute(step)

    def _fetch(self) -> None:
        for layer in self._order:
            self._weights.layer(layer)
            self._weights.release(layer)

    def _await_full(self) -> None:
        """Wait until all buffers are full and the fetching threads idle."""
        deadline = time.monotonic() + self._rank.options.timeout_s
        while not self._weights.is_full:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self._arm.name}: the buffers are not full after {self._rank.options.timeout_s:g} s"
                )
            time.sleep(_IDLE_POLL_S)

    def _disorder(self, events: Iterable[SlotEvent]) -> str | None:
        try:
            self._check.go_on(events)
        except BufferConflictError as error:
            return str(error)
        return None
