"""Measures the arms of ``bench stream`` on one rank, each in random turns with resident weights.

Kinds of passes: ``compute``, a step with resident weights; ``fetch``, every streamed layer taken and released at once, without
computing; ``step``, a step with streamed weights. They take short turns, so that a drift of the machine affects all
alike. Before a turn the buffers are full; its first pass, which finds two layers ready, is not timed.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from tightwire.bench.stream.options import ROUNDS, Arm, StreamOptions
from tightwire.bench.stream.order import OrderCheck
from tightwire.bench.stream.rank import Rank, greedy_tokens, run_step
from tightwire.comm.group import numa
from tightwire.comm.group.group import Group
from tightwire.large_file import LargeFile, reads_direct
from tightwire.model.open import open_checkpoint
from tightwire.model.runner import ModelRunner
from tightwire.model.weights import EVERYTHING_RESIDENT
from tightwire.model.weights.prepared.folder import Prepared
from tightwire.model.weights.streamed import StreamedWeights

_IDLE_POLL_S = 0.001
_PROMPT, _GREEDY_TOKENS = range(3, 15), 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Facts of an arm before it is timed, with the bytes of a step on the rank that fetches most.

    ``same_tokens``: the share of greedy tokens before the first that differs from resident weights'. ``io``: a prepared folder is
    read ``direct`` (around the page cache), or ``dropped`` where that does not work (from it, dropped before each pass).
    """

    arm: Arm
    step_bytes: int
    same_tokens: float
    io: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A round's passes of one kind, each on its slowest rank."""

    arm: Arm
    kind: str  # compute, fetch, step
    batch: int | None  # None for fetch
    seconds: list[float]


Event = Answered | Timed  # from rank 0


def measure(group: Group, options: StreamOptions, location: str, folders: Mapping[str, str]) -> Iterator[Event]:
    """Measure all arms. ``folders``: prepared folders by codec."""
    bind_rank(group, options)
    rank = Rank(group, options, open_checkpoint(location, options.seed))
    resident = rank.build(EVERYTHING_RESIDENT)
    tokens = greedy_tokens(resident, _PROMPT, _GREEDY_TOKENS)
    for arm in options.arms:
        prepared = open_checkpoint(folders[arm.codec]).prepared if arm.is_prepared else None
        yield from _measure_arm(rank, arm, resident, tokens, prepared)


def bind_rank(group: Group, options: StreamOptions) -> tuple[int, ...]:
    """Set this rank's threads and bind it to CPU cores of its own; returns the cores, () if it is not bound."""
    torch.set_num_threads(options.threads)
    if options.device != "cpu":
        return ()
    return numa.bind_rank(group.rank, group.world_size, options.threads, numa=True).cores


def _measure_arm(
    rank: Rank, arm: Arm, resident: ModelRunner, exact: list[int], prepared: Prepared | None
) -> Iterator[Event]:
    direct = prepared is not None and all(map(reads_direct, prepared.paths))
    plan = arm.plan(rank.num_layers, rank.num_streamed, "direct" if direct else "buffered")
    runner = rank.build(plan, prepared)
    try:
        tokens = greedy_tokens(runner, _PROMPT, _GREEDY_TOKENS)
        if arm.codec == "none" and tokens != exact:
            raise RuntimeError(f"{arm.name}: it generates {tokens}, but with resident weights {exact}")
        different = (place for place in range(len(exact)) if tokens[place] != exact[place])
        same = next(different, len(exact)) / len(exact)
        step_bytes = [int(own) for (own,) in rank.group.gather_numbers([rank.step_bytes(plan)])]
        if rank.group.rank == 0:
            io = "" if prepared is None else "direct" if direct else "dropped"
            yield Answered(arm=arm, step_bytes=max(step_bytes), same_tokens=same, io=io)
        with ExitStack() as stack:
            forget = None
            if prepared is not None and not direct:
                path = prepared.paths[rank.group.rank]
                forget = stack.enter_context(closing(LargeFile(path, direct=False))).drop_from_cache
            yield from _Turns(rank, arm, resident, runner, forget).run()
    finally:
        runner.close()


class _Turns:
    """The passes of one arm on one rank, in turns of random order."""

    def __init__(
        self, rank: Rank, arm: Arm, resident: ModelRunner, streamed: ModelRunner, prepare: Callable[[], None] | None
    ) -> None:
        """``prepare``: runs before each pass, on all ranks."""
        assert isinstance(streamed.weights, StreamedWeights)
        self._rank, self._arm, self._resident, self._streamed = rank, arm, resident, streamed
        self._weights, self._prepare = streamed.weights, prepare
        self._order = arm.plan(rank.num_layers, rank.num_streamed).streamed
        self._check = OrderCheck()

    def run(self) -> Iterator[Timed]:
        options = self._rank.options
        turns = [("fetch", None), *((kind, batch) for kind in ("compute", "step") for batch in options.batches)]
        # The same order on all ranks, because their passes are collective.
        order = random.Random(f"{options.seed}/{self._arm.name}")
        for number in range(ROUNDS):
            order.shuffle(turns)
            count = (options.repeats + number) // ROUNDS
            for kind, batch in turns:
                yield from self._turn(kind, batch, count)

    def _turn(self, kind: str, batch: int | None, count: int) -> Iterator[Timed]:
        self._await_full()
        seconds = self._rank.passes(self._pass_of(kind, batch), count, self._prepare)
        self._await_full()
        self._check.check(self._weights.pool.events)
        self._weights.pool.events.clear()  # nothing is in flight, so no event is lost
        ranks = self._rank.group.gather_numbers(seconds)
        if self._rank.group.rank == 0:
            slowest = [max(passes) for passes in zip(*ranks, strict=True)]
            yield Timed(arm=self._arm, kind=kind, batch=batch, seconds=slowest)

    def _pass_of(self, kind: str, batch: int | None) -> Callable[[], object]:
        if batch is None:
            return self._fetch
        runner, step = self._resident if kind == "compute" else self._streamed, self._rank.step(batch)
        return lambda: run_step(runner, step)

    def _fetch(self) -> None:
        for layer in self._order:
            self._weights.layer(layer)
            self._weights.release(layer)

    def _await_full(self) -> None:
        """Wait until all buffers are full and the fetching threads idle."""
        timeout_s = self._rank.options.timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._weights.fetcher.is_full:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._arm.name}: the buffers are not full after {timeout_s:g} s")
            time.sleep(_IDLE_POLL_S)
