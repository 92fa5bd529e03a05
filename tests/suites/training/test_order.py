"""C1 to C4 hold whatever takes how long, with the same results; without any one of the waits they do not, and it shows."""

import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.model.small_llama import small_llama
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.trace_check import Event, OrderError, Trace, check_trace
from helpers.training.training_ranks import (
    adamw,
    assert_same,
    batches_of,
    open_engine,
    reference,
    run_groups,
    run_training,
    train,
)
from torch import Tensor, nn

from tightwire.buffers import BufferConflictError, BufferPool, PoolBuffer
from tightwire.comm.lane import Lane
from tightwire.training.config.sharding import SHARDINGS
from tightwire.training.engine import gathered_weights, gradients
from tightwire.training.engine.flat_parameters import Bucket
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import TrainGroups

Delay = Callable[[], object]
_LONGEST_WAIT_S = 60.0  # of what is to happen; nothing takes as long


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delay: Delay) -> Tensor:
        ctx.delay = delay
        delay()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.delay()
        return grad, None


class Sleepy(nn.Module):
    """SiLU that takes its time, forward and backward."""

    def __init__(self, delay: Delay) -> None:
        super().__init__()
        self._delay = delay

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(nn.functional.silu(x), self._delay)  # pyright: ignore[reportReturnType]

    def __deepcopy__(self, _: object) -> "Sleepy":
        return Sleepy(self._delay)


def slow_down(monkeypatch: pytest.MonkeyPatch, *, gather: Delay, reduce: Delay) -> None:
    def after(delay: Delay, fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            delay()
            return fn(*args)

        return run

    for name in ("gather_shards", "gather_over_nodes", "gather_inside"):
        monkeypatch.setattr(gathered_weights, name, after(gather, getattr(gathered_weights, name)))
    monkeypatch.setattr(gradients, "reduce_scatter", after(reduce, gradients.reduce_scatter))


def slow_llama(delay: Delay) -> nn.Module:
    model = small_llama(num_hidden_layers=6)
    for i in range(6):
        model.get_submodule(f"model.layers.{i}.mlp").act_fn = Sleepy(delay)
    return model


DELAYED: dict[str, tuple[EngineOptions, int, int]] = {  # options, ranks, nodes
    "zero3": (EngineOptions(), 2, 1),
    "hybrid-three-buffers": (EngineOptions(sharding=SHARDINGS["hybrid"], num_buffers=3), 2, 2),
    "zero2": (EngineOptions(sharding=SHARDINGS["zero2"]), 2, 1),
    "copies-of-nodes": (EngineOptions(secondary=True), 4, 2),
    "ends-share": (EngineOptions(reshard_ends=True), 2, 1),
}


@pytest.mark.parametrize("case", DELAYED)
def test_delays_change_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, world_size, num_nodes = DELAYED[case]
    draw = random.Random(case)
    speeds = [draw.choice([0.0, 0.002, 0.005]) for _ in range(3)]

    def delay_of(limit_s: float) -> Delay:
        return lambda: time.sleep(draw.random() * limit_s)

    slow_down(monkeypatch, gather=delay_of(speeds[0]), reduce=delay_of(speeds[1]))
    model, batches = slow_llama(delay_of(speeds[2])), batches_of(world_size, num_steps=2, accumulation=2)

    got = run_training(model, options, batches, num_nodes)

    assert_same(got, reference(model, options, batches, num_nodes))


def test_two_sums_over_nodes_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sum of each rank ends only once its second one has begun: one lane would never begin it."""
    options, batches = EngineOptions(reduce_path="hierarchical"), batches_of(2, num_steps=1, accumulation=1)
    sums, calls, second = gradients.hierarchical_reduce_scatter, [0, 0], [threading.Event(), threading.Event()]

    def summed(group: Any, *given: Any) -> Tensor:
        calls[group.rank] += 1
        if calls[group.rank] == 1:
            assert second[group.rank].wait(_LONGEST_WAIT_S), "no second sum has begun"
        second[group.rank].set()
        return sums(group, *given)

    monkeypatch.setattr(gradients, "hierarchical_reduce_scatter", summed)

    got = run_training(small_llama(), options, batches, num_nodes=2)

    # A node has one rank, so sums inside nodes come first as they do in hybrid.
    by_node = EngineOptions(sharding=SHARDINGS["hybrid"])
    assert_same(got, reference(small_llama(), by_node, batches, num_nodes=2))


class Watched(Trace):
    """A trace that can be waited for, so that what is to happen first does."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: set[tuple[str, str]] = set()
        self._changed = threading.Condition()

    def __call__(self, kind: str, begins: bool, bucket: str, buffer: str) -> None:
        super().__call__(kind, begins, bucket, buffer)
        with self._changed:
            self._begun |= {(kind, bucket)} if begins else set()
            self._changed.notify_all()

    def has(self, kind: str, bucket: str) -> bool:
        return (kind, bucket) in self._begun

    def until(self, kind: str, bucket: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.has(kind, bucket), _LONGEST_WAIT_S), f"no {kind} of {bucket}"


def without_wait_to_fill(watched: Watched, kind: str, bucket: str) -> type[BufferPool]:
    """A pool that takes a buffer from its owner as soon as ``kind`` of ``bucket`` has begun there."""

    class Hasty(BufferPool):
        def fill(self, owner: int, number: int | None = None, timeout_s: float = math.inf) -> PoolBuffer:
            buffer = self.buffers[number or 0]
            if buffer.state != "free":
                watched.until(kind, bucket)
                buffer.owner, buffer.state = None, "free"
            return super().fill(owner, number, timeout_s)

    return Hasty


def without_wait_to_use(watched: Watched, kind: str, bucket: str) -> type[BufferPool]:
    """A pool that hands out a buffer while it is filled, as soon as ``kind`` of ``bucket`` has begun."""

    class Hasty(BufferPool):
        def use(self, owner: int, timeout_s: float) -> PoolBuffer:
            watched.until(kind, bucket)
            for buffer in self.buffers:
                if buffer.owner == owner and buffer.state == "filling":
                    buffer.state = "filled"
            return super().use(owner, timeout_s)

    return Hasty


def train_with(
    monkeypatch: pytest.MonkeyPatch, module: Any, pool: type[BufferPool], watched: Watched, **holds: Delay
) -> list[Event]:
    """The trace of a step with ``pool`` in the place of the product's, in which ``holds`` are waited for."""
    nothing = {name: (lambda: None) for name in ("gather", "reduce", "compute")}
    delays = {**nothing, **holds}
    share_buffers = gathered_weights.share_buffers

    def share(*given: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(gathered_weights, "BufferPool", pool)
            return share_buffers(*given)

    monkeypatch.setattr(module, "share_buffers", share)
    slow_down(monkeypatch, gather=delays["gather"], reduce=delays["reduce"])
    model, batches = slow_llama(delays["compute"]), batches_of(1, num_steps=1, accumulation=1)

    def run_rank(groups: TrainGroups) -> None:
        # The owner of the taken buffer finds out when it gives it back; the trace must have it by then.
        with open_engine(model, groups, EngineOptions(), trace=watched) as engine, suppress(BufferConflictError):
            train(engine, model, batches, 0)

    run_groups(in_process_train_groups(1), run_rank)
    return list(watched.events)


def test_a_missing_wait_for_a_gather_breaks_c1(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    pool = without_wait_to_use(watched, "gather", "blocks.0")

    events = train_with(
        monkeypatch, gathered_weights, pool, watched, gather=lambda: watched.until("compute", "blocks.0")
    )

    with pytest.raises(OrderError, match="C1"):
        check_trace(events)


def test_a_missing_wait_for_computing_breaks_c2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane gets a bucket although another one is still computed with in its buffer."""
    watched = Watched()
    pool = without_wait_to_fill(watched, "compute", "blocks.0")

    gather = gathered_weights.Weights._gather_bucket

    def fill_and_gather(weights: gathered_weights.Weights, bucket: Bucket, place: Any) -> None:
        place.pool.fill(bucket.number, place.number)
        gather(weights, bucket, place)

    monkeypatch.setattr(pool, "fill_later", lambda pool, owner, number, begin: begin())
    monkeypatch.setattr(gathered_weights.Weights, "_gather_bucket", fill_and_gather)

    events = train_with(
        monkeypatch, gathered_weights, pool, watched, compute=lambda: watched.until("gather", "blocks.2")
    )

    with pytest.raises(OrderError, match="C2"):
        check_trace(events)


def test_a_missing_wait_for_a_reduce_breaks_c3(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    pool = without_wait_to_fill(watched, "reduce", "blocks.5")

    events = train_with(monkeypatch, gradients, pool, watched, reduce=lambda: watched.until("write", "blocks.3"))

    with pytest.raises(OrderError, match="C3"):
        check_trace(events)


def test_a_missing_wait_for_writing_breaks_c4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane gets a bucket when its first gradient is written, not its last."""
    watched = Watched()
    pool = without_wait_to_use(watched, "write", "blocks.5")
    begin = gradients.Gradients.begin

    def begin_and_reduce(sums: gradients.Gradients, bucket: Bucket) -> None:
        begin(sums, bucket)
        if bucket.name == "blocks.5":
            sums._lane(bucket).start(lambda: sums._reduce(bucket, sums._buffers[bucket.number], last=True))

    monkeypatch.setattr(gradients.Gradients, "begin", begin_and_reduce)

    def compute() -> None:
        if watched.has("write", "blocks.5"):  # in backward
            watched.until("reduce", "blocks.5")

    events = train_with(monkeypatch, gradients, pool, watched, compute=compute)

    with pytest.raises(OrderError, match="C4"):
        check_trace(events)


def test_a_missing_wait_for_the_lane_gives_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = threading.Event()
    monkeypatch.setattr(Lane, "finish", lambda self, timeout_s: None)
    slow_down(monkeypatch, gather=lambda: None, reduce=lambda: stepped.wait(_LONGEST_WAIT_S))
    # Two blocks, so that backward finds a buffer for each.
    model, batches = small_llama(num_hidden_layers=2), batches_of(1, num_steps=1, accumulation=1)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = adamw(params)
        made.register_step_pre_hook(lambda *_: stepped.set())
        return made

    got = run_training(model, EngineOptions(), batches, optimizer=optimizer)

    with pytest.raises(AssertionError, match="gradients of step 0 differ"):
        assert_same(got, reference(model, EngineOptions(), batches))


def events_of(text: str) -> list[Event]:
    """``gather 0 b0; end gather 0 b0``: kind, bucket, buffer."""
    events = []
    for i, param in enumerate(text.split(";")):
        *end, kind, bucket, buffer = param.split()
        events.append(Event(float(i), kind, not end, bucket, buffer))
    return events


GOOD = (
    "gather 0 w;end gather 0 w;compute 0 w;end compute 0 w;gather 1 w;end gather 1 w;compute 1 w;end compute 1 w;"
    "write 1 g;end write 1 g;reduce 1 g;end reduce 1 g;write 0 g;end write 0 g;reduce 0 g;end reduce 0 g"
)


def test_a_correct_trace_passes() -> None:
    check_trace(events_of(GOOD))


# Nothing comes after the end of computing with unit 1, nor after the last.
@pytest.mark.parametrize("dropped", [i for i in range(15) if i != 7])
def test_a_trace_without_an_event_is_detected(dropped: int) -> None:
    params = GOOD.split(";")
    del params[dropped]

    with pytest.raises(OrderError, match="C[1-4]"):
        check_trace(events_of(";".join(params)))
