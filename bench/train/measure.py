"""Runs the steps of ``bench train`` on each rank: checked steps, then timed steps in turns. Rank 0 yields the results of all."""

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tightwire.allocator import return_freed_memory
from tightwire.bench.train.options import ARMS, TINY, TrainOptions, model_values
from tightwire.bench.train.ranks import grown_by, open_groups, open_torch, reset_peak, sent_by_node
from tightwire.comm.group.group import Group
from tightwire.comm.group.topology import Topology
from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.config.tree import ModelConfig, TrainConfig
from tightwire.training.engine.options import EngineOptions, engine_options
from tightwire.training.estimate.step_time import Computing, Rates
from tightwire.training.optimizer import make_optimizer
from tightwire.training.ranks.groups import TrainGroups
from tightwire.training.run.setup import make_trained
from tightwire.training.start.model import StartingModel, build_model, open_starting_model

_MAX_NORM = 1.0  # of gradients
_CHECKED_STEPS = 3
_SETTLE_S = 0.1
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20  # per rank, of the collectives that show latency and rate
_TRIES = 3


def open_model(model: str, seed: int) -> StartingModel:
    """Raises ModelError: there is no such model."""
    values = ModelConfig.model_validate(model_values(model))
    return open_starting_model(values, seed=seed, keep_in=Path(), texts=lambda: ())


def config_of_arm(options: TrainOptions, name: str) -> tuple[TrainConfig, EngineOptions]:
    """The training configuration of an engine's arm. Raises ValueError: the arm does not fit these ranks."""
    config = TrainConfig.model_validate(
        {
            "run": "bench",
            "device": "cpu",
            "model": {**model_values(options.model), "compute_dtype": options.dtype},
            "data": {"files": ["-"], "sequence_tokens": options.sequence_tokens},  # tokens are random, no file is read
            "batch": {
                "sequences": options.sequences[0] * options.world_size,
                "micro_sequences": options.sequences[0],
            },
            "optimizer": ARMS[name].optimizer,
            "parallel": {**ARMS[name].parallel, "timeout_s": options.timeout_s},
        }
    )
    how = engine_options(config)
    try:
        config.check_ranks(Topology(0, options.world_size, num_nodes=options.nodes))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return config, how


class Trainee(ABC):
    """A model that learns step by step, timed. ``bytes_sent``: so far, by the ledgers."""

    model: Any
    bytes_sent = 0

    def step(self, tokens_BS: Tensor) -> tuple[float, Computing]:
        """The loss, and the seconds of forward, of backward and of the rest with the wait for the last gradients."""
        inputs_BS, targets_BS = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()
        begun = time.perf_counter()
        with self.micro_batch():
            loss = self.model(input_ids=inputs_BS, labels=targets_BS, shift_labels=targets_BS, use_cache=False).loss
            forward = time.perf_counter()
            loss.backward()
        backward = time.perf_counter()
        self.update()
        times = Computing(forward - begun, backward - forward, time.perf_counter() - backward)
        return float(loss.detach()), times

    def micro_batch(self) -> AbstractContextManager[None]:
        return nullcontext()

    @abstractmethod
    def update(self) -> None:
        """Change the weights by the gradients."""

    def close(self) -> None:
        return


class EngineTrainee(Trainee):
    """Runs the steps of ``training.run.loop``, without logging, evaluation and checkpoints."""

    def __init__(self, name: str, options: TrainOptions, start: StartingModel, groups: TrainGroups) -> None:
        config, how = config_of_arm(options, name)
        self.trained = make_trained(config, how, start, groups)
        self.trained.engine.load_full(start.read)
        self.model = self.trained.model.train()
        self._optimizer = self.trained.state.optimizer
        # DGC clips local gradients, so do not clip their sum; its norm is still computed, as in a run.
        self._max_norm = math.inf if config.optimizer.clip_norm is None else _MAX_NORM
        self._ledgers = [group.ledger for group in (groups.gather, groups.reduce, groups.main)]

    def micro_batch(self) -> AbstractContextManager[None]:
        return self.trained.engine.micro_batch(last=True)

    def update(self) -> None:
        engine = self.trained.engine
        engine.finish_gradients()
        engine.clip_gradients(self._max_norm)
        self._optimizer.step()
        engine.weights_changed()

    @property
    def bytes_sent(self) -> int:
        return sum(count.bytes_sent for ledger in self._ledgers for count in ledger.counters.counts())

    def close(self) -> None:
        self.trained.engine.close()


class PeerTrainee(Trainee):
    """``ddp``: DistributedDataParallel. ``fsdp2``: fully_shard of each block and of the rest, weights freed after forward.

    Modules, weights, batches and optimizer are the engine's. With bfloat16, FSDP2 computes in bfloat16 and sums in float32,
    as the engine does; DDP supports only float32 here.
    """

    def __init__(self, name: str, options: TrainOptions, start: StartingModel) -> None:
        arm = ARMS[name]
        model = build_model(start.config, device=torch.device("cpu"))
        loaded = {name: start.read(name) for name, _ in model.named_parameters()}  # each tied one once
        model.load_state_dict(loaded, strict=False, assign=True)
        model.tie_weights()
        if arm.peer == "fsdp2":
            how: dict[str, Any] = {
                "mesh": init_device_mesh("cpu", (options.world_size,)),
                "mp_policy": MixedPrecisionPolicy(
                    param_dtype=getattr(torch, options.dtype), reduce_dtype=torch.float32
                ),
            }
            for block in model.model.layers:
                fully_shard(block, **how)
            fully_shard(model, **how)
            self.model = model
        else:
            self.model = DistributedDataParallel(model)
        parameters = list(model.parameters())
        matrices = [parameter for parameter in parameters if parameter.dim() > 1]
        norms = [parameter for parameter in parameters if parameter.dim() <= 1]
        groups = [{"params": matrices, "name": "matrices"}, {"params": norms, "name": "norms"}]
        self._optimizer = make_optimizer(OptimizerConfig(**arm.optimizer), groups)
        self.model.train()

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()


def make_trainee(name: str, options: TrainOptions, start: StartingModel, groups: TrainGroups) -> Trainee:
    """A trainee of the arm; the engine's use ``groups``, torch's use torch's default group."""
    return PeerTrainee(name, options, start) if ARMS[name].peer else EngineTrainee(name, options, start, groups)


def draw_tokens(options: TrainOptions, vocab_size: int, rank: int, step: int) -> Tensor:
    """Random tokens, the same in every arm. At most 256 different ids, so that the loss can fall."""
    source = torch.Generator().manual_seed((options.seed * 1_000_003 + step) * 1_009 + rank)
    return torch.randint(0, min(256, vocab_size), (options.sequences[0], options.sequence_tokens + 1), generator=source)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The checked steps of one arm: mean losses over the ranks, and each rank's bytes of the last step by the ledgers.

    ``peak_bytes``: peak growth of resident memory during the arm on the highest rank, while the allocator returns all freed
    memory to the system, or None where the system does not tell.
    """

    losses: list[float]
    bytes_sent: list[int]
    peak_bytes: int | None


class Wired(NamedTuple):
    """Bytes without headers of the node that sends most in one step."""

    arm: str
    payload_bytes: int


class Timed(NamedTuple):
    """A step on the slowest rank. ``computing``: its parts, of a step without messages."""

    arm: str
    step_s: float
    computing: Computing | None


def check_arm(world: Group, folder: str, options: TrainOptions, name: str) -> Iterator[Checked]:
    """Check losses, bytes and memory of one arm in a fresh process."""
    start = open_model(options.model, options.seed)
    with ExitStack() as stack:
        if ARMS[name].peer:
            stack.enter_context(open_torch(folder, world))
        groups, _ = stack.enter_context(open_groups(folder, world, options))
        # A step of a tiny model, so that memory of libraries and compiled kernels does not count for the arm.
        tiny, tiny_start = (
            replace(options, model=TINY, sequences=(1,), sequence_tokens=16),
            open_model(TINY, options.seed),
        )
        with closing(make_trainee(name, tiny, tiny_start, groups)) as trainee:
            trainee.step(draw_tokens(tiny, tiny_start.config.vocab_size, 0, 0))
        before = reset_peak() if return_freed_memory() else None
        trainee = stack.enter_context(closing(make_trainee(name, options, start, groups)))

        def step(number: int) -> float:
            return trainee.step(draw_tokens(options, start.config.vocab_size, world.rank, number))[0]

        losses = [step(number) for number in range(_CHECKED_STEPS - 1)]
        sent = trainee.bytes_sent
        losses.append(step(_CHECKED_STEPS - 1))
        ranks = world.gather_numbers([*losses, trainee.bytes_sent - sent, grown_by(before) or 0])
        if world.rank == 0:
            *steps, sent, peaks = zip(*ranks, strict=True)
            yield Checked(
                losses=[fmean(step) for step in steps],
                bytes_sent=[int(each) for each in sent],
                peak_bytes=int(max(peaks)) or None,
            )


def measure_link(world: Group, folder: str, options: TrainOptions) -> Iterator[Rates | Wired | Timed]:
    """Time steps of all arms in turns, in random order; after each engine's turn as many steps without messages."""
    start, numbers = open_model(options.model, options.seed), iter(range(1, 1 << 62))
    order = random.Random(options.seed)  # the same on all ranks
    with ExitStack() as stack:
        if any(ARMS[name].peer for name in options.arms):
            stack.enter_context(open_torch(folder, world))
        groups, switch = stack.enter_context(open_groups(folder, world, options))
        trainees = {
            name: stack.enter_context(closing(make_trainee(name, options, start, groups))) for name in options.arms
        }

        def step(name: str) -> Computing:
            world.transport.barrier()
            tokens_BS = draw_tokens(options, start.config.vocab_size, world.rank, next(numbers))
            return trainees[name].step(tokens_BS)[1]

        def timed(name: str, *, alone: bool) -> Iterator[Timed]:
            switch.is_detached = alone
            ranks = world.gather_numbers([*step(name)])
            switch.is_detached = False
            if world.rank == 0:
                seconds = [sum(own) for own in ranks]
                # The means over the ranks, scaled to the slowest one.
                parts = [fmean(part) * max(seconds) / fmean(seconds) for part in zip(*ranks, strict=True)]
                yield Timed(name, max(seconds), Computing(*parts) if alone else None)

        for name in trainees:
            yield from _count_bytes(world, name, step)
        yield from _probe_link(world, groups.main)
        for _ in range(options.repeats):
            names = list(trainees)
            order.shuffle(names)
            for name in names:
                for alone in (False,) if ARMS[name].peer else (False, True):
                    for _ in range(options.steps):
                        yield from timed(name, alone=alone)


def _count_bytes(world: Group, name: str, step: Callable[[str], object]) -> Iterator[Wired]:
    """Count the bytes of one step, which is also the warm-up."""
    world.transport.barrier()
    time.sleep(_SETTLE_S)  # so that the barrier's last packets are not counted
    before = sent_by_node()
    step(name)  # the few small packets of its barrier are counted
    world.transport.barrier()
    time.sleep(_SETTLE_S)
    payloads = world.gather_numbers([sent_by_node() - before])
    if world.rank == 0:
        yield Wired(name, max(int(own) for (own,) in payloads))


def _probe_link(world: Group, lane: Group) -> Iterator[Rates]:
    """The rate and latency of all-gathers across and inside nodes, on all ranks at once."""
    assert lane.nodes is not None
    rates: list[float] = []
    for leg in (lane.nodes.across, lane.nodes.inside):
        small_s, large_s = (_gather_s(world, leg, num_bytes) for num_bytes in (_SMALL_BYTES, _LARGE_BYTES))
        moved = (leg.world_size - 1) * (_LARGE_BYTES - _SMALL_BYTES)  # 0 inside a node of one rank
        rates += [moved / max(large_s - small_s, 1e-9), small_s] if moved else [math.inf, 0.0]
    if world.rank == 0:
        yield Rates(*rates)


def _gather_s(world: Group, leg: Group, num_bytes: int) -> float:
    """The median time of an all-gather on the slowest rank."""
    buf, seconds = torch.zeros(num_bytes, dtype=torch.uint8), []
    leg.transport.gather(buf)
    for _ in range(_TRIES):
        world.transport.barrier()
        begun = time.perf_counter()
        leg.transport.gather(buf)
        seconds.append(time.perf_counter() - begun)
    return max(own for (own,) in world.gather_numbers([median(seconds)]))
