"""The passes of one arm on one rank: kinds and loads in random turns, in short blocks, each checked as it ends."""

import random
import time
from collections.abc import Callable, Iterable, Iterator

from tightwire.bench.stream.cells import Arm, Load
from tightwire.bench.stream.events import Timed
from tightwire.bench.stream.options import ROUNDS
from tightwire.bench.stream.rank import Rank
from tightwire.bench.stream.raw_source import RawPass
from tightwire.bench.stream.trace import trace_pass
from tightwire.comm.buffers import BufferConflictError, OrderCheck, SlotEvent
from tightwire.model.runner import ModelRunner
from tightwire.model.weights.streamed import StreamedWeights

_IDLE_POLL_S = 0.001


class Turns:
    """The blocks of one arm, and of the resident weights beside it."""

    def __init__(
        self,
        rank: Rank,
        arm: Arm,
        resident: ModelRunner,
        streamed: ModelRunner,
        raw: RawPass | None,
        prepare: Callable[[], None] | None,
    ) -> None:
        """``raw``: a pass of the source by itself; ``prepare``: what comes before each pass, of all ranks."""
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
        # The same on all ranks: they must do the same at the same time.
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
        self._weights.pool.events.clear()  # nothing is under way, so nothing is lost
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
        """Until all buffers have their layers: the threads that fetch then wait."""
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
