"""Predicts the time of a step from its computing time, the link's rate and latency, and the engine's scheduling rules.

Two lanes of collectives run beside computing; blocks alternate over the weight buffers and over two gradient buffers. Nothing is
fitted to steps over the link. The CPU time that packets take from computing is ignored.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tightwire.training.engine import gathered_weights, gradients
from tightwire.training.engine.costs import Flow
from tightwire.training.engine.flat_parameters import EMBEDDING, HEAD, Bucket, BucketPlan
from tightwire.training.engine.options import EngineOptions
from tightwire.training.estimate.step import StepModel

_COMPUTE, _GATHER, _REDUCE = "compute", "gather", "reduce"
_NO_TIME = 1e-12


class Computing(NamedTuple):
    """Seconds of the parts of a step without messages, while all ranks compute."""

    forward_s: float
    backward_s: float
    rest_s: float


class Rates(NamedTuple):
    """Rates of each rank while all ranks of its node send. ``_round_s`` is the time of a collective of a few bytes."""

    across_bytes_per_s: float
    across_round_s: float
    inside_bytes_per_s: float
    inside_round_s: float


class Task(NamedTuple):
    """Waits for other tasks, takes ``fixed_s``, then sends for ``wire_s`` if it has the link alone."""

    name: str
    actor: str
    after: tuple[str, ...]  # names without a task count as ended
    fixed_s: float
    wire_s: float = 0.0


def predict_step(model: StepModel, computing: Computing, rates: Rates) -> float:
    """Seconds of a step of one micro-batch."""
    gathers = _gathers(model.plan, model.options, model.flows, rates)
    reduces = _reduces(model, rates)
    # Clipping takes one collective.
    rest_s = computing.rest_s + rates.across_round_s
    rest = Task("rest", _COMPUTE, tuple(task.name for task in reduces), rest_s)
    return max(simulate([*gathers, *_computing(model.plan, model.options, computing), *reduces, rest]).values())


def _gathers(plan: BucketPlan, options: EngineOptions, flows: Sequence[Flow], rates: Rates) -> Iterator[Task]:
    num_blocks, ahead = len(plan.blocks), options.num_buffers
    forward, backward = options.ahead("forward"), options.ahead("backward")
    calls = {bucket.number: _calls(bucket, flows, rates) for bucket in plan.buckets}
    late = [bucket for bucket in plan.buckets if _shares_as_head(options, bucket)]
    for bucket in plan.buckets:
        if bucket.block is None and calls[bucket.number] and bucket not in late:
            yield Task(f"gather {bucket.name}", _GATHER, (), *calls[bucket.number][0])
    blocks = list(enumerate(plan.blocks))
    for block, bucket in blocks:
        if not calls[bucket.number]:
            continue
        # A shared buffer is free once its previous block is done; an unshared one is requested one block earlier.
        before = block - forward - (not gathered_weights.shares_weight_buffer(options, bucket))
        after = f"forward {before if forward else block - 1}"
        yield Task(f"gather {block}", _GATHER, (after,), *calls[bucket.number][0])
    for bucket in late:
        yield Task(f"gather {bucket.name}", _GATHER, (f"forward {num_blocks - 1 - forward}",), *calls[bucket.number][0])
    for block, bucket in reversed(blocks):
        if len(calls[bucket.number]) > 1:
            assert block < num_blocks - ahead
            after = f"backward {block + (backward or 1)}"
            yield Task(f"gather again {block}", _GATHER, (after,), *calls[bucket.number][1])


def _computing(plan: BucketPlan, options: EngineOptions, computing: Computing) -> Iterator[Task]:
    elems = [bucket.num_parameters for bucket in plan.blocks]
    # The head, tied or not, has the embedding's size; an embedding lookup has no arithmetic.
    head = next(bucket.num_parameters for bucket in plan.buckets if bucket.name == EMBEDDING)
    total = sum(elems) + head
    others = [bucket for bucket in plan.buckets if bucket.block is None]
    first = tuple(f"gather {bucket.name}" for bucket in others if not _shares_as_head(options, bucket))
    for block, count in enumerate(elems):
        after = (f"gather {block}", *(first if block == 0 else ()))
        yield Task(f"forward {block}", _COMPUTE, after, computing.forward_s * count / total)
    yield Task("forward head", _COMPUTE, (f"gather {HEAD}",), computing.forward_s * head / total)
    yield Task("backward head", _COMPUTE, (), computing.backward_s * head / total)
    for block, count in reversed(list(enumerate(elems))):
        after = [f"gather again {block}"]
        before = block + gradients.NUM_BUFFERS  # the previous block in the same gradient buffer
        if before < len(elems) and gradients.shares_gradient_buffer(options, plan.blocks[block]):
            after.append(f"reduce {plan.blocks[before].name}")
        yield Task(f"backward {block}", _COMPUTE, tuple(after), computing.backward_s * count / total)


def _reduces(model: StepModel, rates: Rates) -> list[Task]:
    tasks, num_lanes = list[Task](), gradients.num_reduce_lanes(model.options, model.topology.num_nodes)
    compressing = [] if model.config.parallel.between.takes_all_sums else tasks
    # Norms are complete before the embedding.
    others = [bucket for bucket in reversed(model.plan.buckets) if bucket.block is None]
    early = [bucket for bucket in others if _shares_as_head(model.options, bucket)]
    for bucket in (*early, *reversed(model.plan.blocks), *(bucket for bucket in others if bucket not in early)):
        after = "backward head" if bucket in early else f"backward {bucket.block or 0}"
        for flow in _flows_of(bucket, model.flows, _REDUCE):
            if flow.calls:
                lane = f"{_REDUCE} {bucket.number % num_lanes}"
                tasks.append(Task(f"reduce {bucket.name}", lane, (after,), *_seconds([flow], rates)))
        if sent := model.compressors.get(bucket.name):
            fixed_s = sent.rounds * rates.across_round_s + sent.inside / rates.inside_bytes_per_s
            wire_s = sent.between_nodes / rates.across_bytes_per_s
            compressing.append(Task(f"compress {bucket.name}", f"{_REDUCE} 0", (after,), fixed_s, wire_s))
    return tasks if compressing is tasks else [*tasks, *compressing]


def _shares_as_head(options: EngineOptions, bucket: Bucket) -> bool:
    """A head that shares buffers with the embedding, so it comes behind the last block and goes before it."""
    return bucket.name == HEAD and options.may_share(bucket)


def _calls(bucket: Bucket, flows: Sequence[Flow], rates: Rates) -> list[tuple[float, float]]:
    """(fixed, wire) seconds of each gather of a bucket in a step; flows that run once count for the first gather only."""
    own = _flows_of(bucket, flows, _GATHER)
    return [
        _seconds([flow for flow in own if number < flow.calls], rates)
        for number in range(max((flow.calls for flow in own), default=0))
    ]


def _flows_of(bucket: Bucket, flows: Sequence[Flow], lane: str) -> list[Flow]:
    names = [flat_param.name for flat_param in bucket.flat_params]
    return [flow for flow in flows if flow.lane == lane and flow.flat_param in names]


def _seconds(flows: Sequence[Flow], rates: Rates) -> tuple[float, float]:
    """(seconds before the link, seconds on it)."""
    fixed_s = wire_s = 0.0
    for flow in flows:
        fixed_s += rates.across_round_s if flow.bytes_between_nodes else rates.inside_round_s
        fixed_s += (flow.bytes_sent - flow.bytes_between_nodes) / rates.inside_bytes_per_s
        wire_s += flow.bytes_between_nodes / rates.across_bytes_per_s
    return fixed_s, wire_s


def simulate(tasks: Sequence[Task]) -> dict[str, float]:
    """The end time of each task, in seconds. Raises ValueError: tasks wait for each other.

    Each actor runs its tasks in order. Tasks that send at the same time share the link equally.
    """
    names = {task.name for task in tasks}
    queues: dict[str, deque[Task]] = {}
    for task in tasks:
        queues.setdefault(task.actor, deque()).append(task)
    left: dict[str, list[float]] = {}  # [fixed, wire] seconds left of running tasks
    ends: dict[str, float] = {}
    now = 0.0
    while any(queues.values()):
        waiting = [queue[0] for queue in queues.values() if queue]
        running = [task for task in waiting if all(name in ends or name not in names for name in task.after)]
        if not running:
            raise ValueError(f"tasks wait for each other: {', '.join(task.name for task in waiting)}")
        for task in running:
            left.setdefault(task.name, [task.fixed_s, task.wire_s])
        sending = sum(left[task.name][0] <= _NO_TIME for task in running)
        of_running = (left[task.name] for task in running)
        step_s = min(fixed_s if fixed_s > _NO_TIME else max(0.0, wire_s) * sending for fixed_s, wire_s in of_running)
        now += step_s
        for task in running:
            own = left[task.name]
            if own[0] > _NO_TIME:
                own[0] -= step_s
            else:
                own[1] -= step_s / sending
            if max(own) <= _NO_TIME:
                ends[task.name] = now
                queues[task.actor].popleft()
    return ends
