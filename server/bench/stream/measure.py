"""What a rank of ``bench stream`` does: one arm after the other, each beside resident weights, in random turns.

Three kinds of passes: ``compute``, a step with resident weights; ``fetch``, every streamed layer waited for and given back at
once, so all of its way but no computing; ``step``, a step with streamed weights. They take turns in short blocks, so that a
machine's drift meets all alike. Before a block the buffers are full and nothing is under way, and its first pass, which has two
layers for nothing, is not timed.

Nothing is timed that was not checked: greedy tokens are told for a comparison with resident weights', and the whole trace of
the buffers must keep their order.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tightwire.comm.buffers import BufferConflictError, SlotEvent, check_order
from tightwire.comm.group import Group
from tightwire.comm.policy.routes import Routes, make_candidates
from tightwire.comm.policy.rules import PHASES, SITES, Choice, Policy, Rule
from tightwire.model.build import build_runner
from tightwire.model.checkpoint import Checkpoint, open_checkpoint
from tightwire.model.layout import make_layout
from tightwire.model.runner import ModelRunner
from tightwire.model.step import StepPlan
from tightwire.model.weights.formats import choose_formats
from tightwire.model.weights.residency import EVERYTHING_RESIDENT, WeightPlan, WeightSizes
from tightwire.model.weights.streamed import StreamedWeights
from tightwire.server.bench.stream.cells import Arm, Load
from tightwire.server.bench.stream.options import ROUNDS, StreamBenchOptions
from tightwire.server.bench.stream.steps import BLOCK_SIZE, greedy_tokens, make_step
from tightwire.server.bench.stream.trace import PassTrace, trace_pass

PROBE = Load(False, 512)  # tells how many operations a second the device computes with many rows
_PROBES = 3
_PROMPT_TOKENS, _GREEDY_TOKENS = 12, 12
_IDLE_POLL_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Seconds of steps with ``PROBE`` and resident weights; before all arms."""

    seconds: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """Before an arm is timed: the bytes that each of its steps brings in, and the tokens it answers."""

    arm: Arm
    step_bytes: int
    tokens: list[int]
    resident_tokens: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A block of passes of one kind. ``core_s``: what this process used of all cores. ``traces``: of a ``step`` on CPU."""

    arm: Arm
    kind: str  # compute, fetch, step
    load: Load | None  # None: a fetch has none
    seconds: list[float]
    core_s: list[float]
    traces: list[PassTrace]
    disorder: str | None  # what was out of order in the buffers' trace so far


def measure(group: Group, options: StreamBenchOptions, location: str) -> Iterator[Probed | Answered | Timed]:
    torch.set_num_threads(options.threads)
    rank = Rank(group, options, open_checkpoint(location, options.seed))
    resident = rank.build(EVERYTHING_RESIDENT)
    prompt = list(range(3, 3 + _PROMPT_TOKENS))
    expected = greedy_tokens(resident, group, prompt, _GREEDY_TOKENS)
    yield Probed(seconds=rank.passes(lambda: resident.execute(rank.step(PROBE)), _PROBES)[0])
    for arm in options.arms:
        plan = arm.plan(rank.num_layers, options.stream_layers or rank.num_layers)
        runner = rank.build(plan)
        try:
            tokens = greedy_tokens(runner, group, prompt, _GREEDY_TOKENS)
            step_bytes = rank.step_bytes(plan)
            yield Answered(arm=arm, step_bytes=step_bytes, tokens=tokens, resident_tokens=expected)
            yield from _Turns(rank, arm, resident, runner).blocks()
        finally:
            runner.close()


class Rank:
    """What all arms have in common on this rank."""

    def __init__(self, group: Group, options: StreamBenchOptions, checkpoint: Checkpoint) -> None:
        self.group, self.options = group, options
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._layout = make_layout(self._config, group.world_size)
        self._formats = choose_formats(checkpoint.reader(), self._config, options.quantization)
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._routes = _routes(options.all_reduce, group) if group.world_size > 1 else None

    @property
    def num_layers(self) -> int:
        return self._config.num_layers

    def build(self, plan: WeightPlan) -> ModelRunner:
        longest = max(self.options.context, self.options.prompt_rows or 0, PROBE.rows)
        each = -(-self.options.context // BLOCK_SIZE)
        return build_runner(
            self._config,
            self._checkpoint.reader(),
            self.group,
            self._layout,
            routes=self._routes,
            dtype=self._dtype,
            max_model_len=longest,
            num_blocks=max(-(-longest // BLOCK_SIZE), each * max(self.options.batches)),
            block_size=BLOCK_SIZE,
            formats=self._formats,
            weight_plan=plan,
            fetch_timeout_s=self.options.timeout_s,
        )

    def step_bytes(self, plan: WeightPlan) -> int:
        shard = self._layout.shards[self.group.rank]
        return WeightSizes(self._config, shard, self._formats, self._dtype, plan.codec).per_pass(plan)

    def step(self, load: Load) -> StepPlan:
        return make_step(load, self.options.context, self._config.vocab_size, self.options.seed)

    def passes(self, run: Callable[[], object], count: int) -> tuple[list[float], list[float], list[float]]:
        """One pass that is not timed, then ``count``: their seconds, core seconds, and beginnings. All ranks begin together."""
        seconds, core_s, begins = [], [], []
        for number in range(1 + count):
            self.group.transport.barrier()
            self._synchronize()
            begin, core = time.perf_counter(), time.process_time()
            run()
            self._synchronize()
            if number:
                seconds.append(time.perf_counter() - begin)
                core_s.append(time.process_time() - core)
                begins.append(begin)
        return seconds, core_s, begins

    def _synchronize(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)


class _Turns:
    """The blocks of one arm, and of the resident weights beside it."""

    def __init__(self, rank: Rank, arm: Arm, resident: ModelRunner, streamed: ModelRunner) -> None:
        assert isinstance(streamed.weights, StreamedWeights)
        self._rank, self._arm, self._resident, self._streamed = rank, arm, resident, streamed
        self._weights = streamed.weights
        self._order = arm.plan(rank.num_layers, rank.options.stream_layers or rank.num_layers).streamed
        self._events: list[SlotEvent] = []

    def blocks(self) -> Iterator[Timed]:
        options = self._rank.options
        turns = [("fetch", None), *((kind, load) for kind in ("compute", "step") for load in options.loads)]
        # The same on all ranks: they must do the same at the same time.
        order = random.Random(f"{options.seed}/{self._arm.name}")
        for number in range(ROUNDS):
            order.shuffle(turns)
            count = (options.repeats + number) // ROUNDS
            for kind, load in turns:
                yield self._block(kind, load, count)

    def _block(self, kind: str, load: Load | None, count: int) -> Timed:
        self._await_full()
        if load is None:
            seconds, core_s, begins = self._rank.passes(self._fetch, count)
        else:
            runner, step = self._resident if kind == "compute" else self._streamed, self._rank.step(load)
            seconds, core_s, begins = self._rank.passes(lambda: runner.execute(step), count)
        self._await_full()
        new = list(self._weights.pool.events)
        self._weights.pool.events.clear()  # nothing is under way, so nothing is lost
        self._events += new
        traced = kind == "step" and self._rank.group.device.type == "cpu"
        traces = [trace_pass(new, begin, begin + taken) for begin, taken in zip(begins, seconds, strict=True)]
        return Timed(
            arm=self._arm,
            kind=kind,
            load=load,
            seconds=seconds,
            core_s=core_s,
            traces=traces if traced else [],
            disorder=self._disorder(),
        )

    def _fetch(self) -> None:
        for layer in self._order:
            self._weights.layer(layer)
            self._weights.release(layer)

    def _await_full(self) -> None:
        """Until both buffers have their layers: the thread that fetches then waits."""
        deadline = time.monotonic() + self._rank.options.timeout_s
        while any(slot.state != "filled" for slot in self._weights.pool.slots):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self._arm.name}: the buffers are not full after {self._rank.options.timeout_s:g} s"
                )
            time.sleep(_IDLE_POLL_S)

    def _disorder(self) -> str | None:
        try:
            check_order(self._events)
        except BufferConflictError as error:
            return str(error)
        return None


def _routes(name: str, group: Group) -> Routes:
    """One AllReduce for every message."""
    choices = (Choice(up_to_bytes=None, algorithms=(name,), reason="for everything"),)
    policy = Policy(tuple(Rule(site, phase, choices) for site in SITES for phase in PHASES))
    return Routes([(name, policy)], make_candidates([policy], group))
