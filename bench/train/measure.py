"""Runs the steps of ``bench train`` on each rank: checked steps, then timed steps in turns."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from tightwire.bench.train.arms import ARMS, TINY, open_model
from tightwire.bench.train.detached import Switch
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.probes import Probed, grown_by, probe_link, reset_peak, sent_by_node
from tightwire.bench.train.ranks import RankPlan, open_shared_groups, open_torch_group
from tightwire.bench.train.trainee import EngineTrainee, StepTimes, Trainee, draw_tokens, make_trainee
from tightwire.comm.group.group import Group
from tightwire.kernels.cpu.allocator import keep_freed_memory, return_freed_memory
from tightwire.training.start.model import StartingModel

_CHECKED_STEPS = 3
_KEEPING_STEPS = 2  # steps until the allocator's memory no longer grows
_SETTLE_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The checked steps of one arm on one rank. ``bytes_sent``: in the last step, by the ledgers; None for a peer.

    ``peak_bytes``: peak growth of resident memory during the arm, while the allocator returns all freed memory to the system.
    ``resident_bytes``: the same while the allocator keeps freed memory, as in timed steps. None: not known on this system.
    """

    arm: str
    losses: tuple[float, ...]
    bytes_sent: int | None
    peak_bytes: int | None
    resident_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wired:
    """Bytes that this rank's node sent in one step, without and with headers."""

    arm: str
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A timed step; ``detached``: without messages. ``number`` is the same on all ranks of the step."""

    arm: str
    detached: bool
    number: int
    times: StepTimes


def check_arm(world: Group, plan: RankPlan, options: TrainBenchOptions, name: str) -> Iterator[Checked]:
    """Check losses, bytes and memory of one arm in a fresh process."""
    arm, rank, start = ARMS[name], world.rank, open_model(options.model, options.seed)
    with ExitStack() as stack:
        groups = None
        if arm.peer:
            stack.enter_context(open_torch_group(plan, rank))
        else:
            groups, _ = stack.enter_context(open_shared_groups(plan, rank))
        # A step of a tiny model, so that memory of libraries and compiled kernels does not count for the arm.
        tiny, tiny_start = replace(options, model=TINY, sequences=1, sequence_tokens=16), open_model(TINY, options.seed)
        with closing(make_trainee(arm, tiny, tiny_start, groups)) as trainee:
            trainee.step(draw_tokens(tiny, tiny_start.config.vocab_size, 0, 0))
        before = reset_peak() if return_freed_memory() else None
        trainee = stack.enter_context(closing(make_trainee(arm, options, start, groups)))
        losses, sent = [], 0
        for step in range(_CHECKED_STEPS):
            sent = trainee.bytes_sent if isinstance(trainee, EngineTrainee) else 0
            losses.append(trainee.step(draw_tokens(options, start.config.vocab_size, rank, step)).loss)
        sent = trainee.bytes_sent - sent if isinstance(trainee, EngineTrainee) else None
        peak = grown_by(before)
        keep_freed_memory()
        for step in range(_CHECKED_STEPS, _CHECKED_STEPS + _KEEPING_STEPS):
            trainee.step(draw_tokens(options, start.config.vocab_size, rank, step))
        yield Checked(arm=name, losses=tuple(losses), bytes_sent=sent, peak_bytes=peak, resident_bytes=grown_by(before))


def measure_link(world: Group, plan: RankPlan, options: TrainBenchOptions) -> Iterator[Probed | Wired | Timed]:
    """Time steps of all arms in turns, in random order."""
    start = open_model(options.model, options.seed)
    arms = [ARMS[name] for name in options.arms]
    with ExitStack() as stack:
        if any(arm.peer for arm in arms):
            stack.enter_context(open_torch_group(plan, world.rank))
        groups, switch = stack.enter_context(open_shared_groups(plan, world.rank))
        trainees = {
            arm.name: stack.enter_context(closing(make_trainee(arm, options, start, None if arm.peer else groups)))
            for arm in arms
        }
        run = _Turns(world, options, start, trainees)
        for name in trainees:
            yield run.count_bytes(name)
        yield from probe_link(world, groups)
        order = random.Random(options.seed)  # the same on all ranks
        for _ in range(options.repeats):
            names = list(trainees)
            order.shuffle(names)
            for name in names:
                yield from run.turn(name, switch)


class _Turns:
    """Steps of all arms. ``number`` counts them, the same on all ranks, and selects the tokens."""

    def __init__(
        self, world: Group, options: TrainBenchOptions, start: StartingModel, trainees: dict[str, Trainee]
    ) -> None:
        self._world, self._options, self._start, self._trainees = world, options, start, trainees
        self._number = 0

    def count_bytes(self, name: str) -> Wired:
        """Count the bytes of one step, which is also the warm-up."""
        self._world.transport.barrier()
        time.sleep(_SETTLE_S)  # so that the barrier's last packets are not counted
        before = sent_by_node()
        self._step(name)
        self._world.transport.barrier()  # its few small packets are counted
        time.sleep(_SETTLE_S)
        sent = sent_by_node().since(before)
        return Wired(arm=name, payload_bytes=sent.payload_bytes, wire_bytes=sent.num_bytes)

    def turn(self, name: str, switch: Switch) -> Iterator[Timed]:
        """Steps over the link, then, of an engine's arm, as many without messages."""
        for _ in range(self._options.steps):
            yield self._timed(name, detached=False)
        if isinstance(self._trainees[name], EngineTrainee):
            for _ in range(self._options.steps):
                with switch.detached():
                    yield self._timed(name, detached=True)

    def _timed(self, name: str, *, detached: bool) -> Timed:
        self._world.transport.barrier()
        times = self._step(name)
        return Timed(arm=name, detached=detached, number=self._number, times=times)

    def _step(self, name: str) -> StepTimes:
        self._number += 1
        tokens_BS = draw_tokens(self._options, self._start.config.vocab_size, self._world.rank, self._number)
        return self._trainees[name].step(tokens_BS)
