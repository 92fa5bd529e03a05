"""Ranks that train as threads of this process, and what plain torch makes of the same batches in one thread.

``reference`` is DDP with a hook that adds in rank order (``tests/suites/training/test_beside_torch`` holds the engine against torch's own): a
gradient is computed rank by rank, added up over ranks in the order that a sharding has, and divided once.
"""

import copy
import hashlib
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import run_threads
from helpers.training.thread_groups import in_process_train_groups
from helpers.training.trace_check import Trace, check_trace
from torch import Tensor, nn

from tightwire.training.compression.compressors import Replicas, make_compressor
from tightwire.training.config.optimizer import CompressorOptions, DenseOptions
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import cut_shard, plan_buckets
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import TrainGroups, replica_group, shard_group

_END_S = 10.0  # for a lane's thread to end once its engine is closed

DENSE = DenseOptions()
VOCABULARY = 80
_TOKENS = 12
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


class Run(NamedTuple):
    """``losses`` by micro-batch; ``gradients`` by step and name, of parameters that have any; ``parameters`` at the end."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    norms: list[float]


def open_engine(
    model: nn.Module,
    groups: TrainGroups,
    options: EngineOptions,
    trace: Trace | None = None,
    compressor: CompressorOptions = DENSE,
    per_bucket: int = 1,
) -> closing[Engine]:
    replicas = replica_group(groups.reduce, options.sharding)
    ranks = options.sharding.shard_ranks(groups.world_size, groups.num_nodes)
    plan = plan_buckets(model, ranks, per_bucket=per_bucket)
    shard = shard_group(groups.reduce, options.sharding)
    shards = {
        flat_param.name: cut_shard(flat_param, shard.rank, shard.world_size)
        for flat_param in plan.flat_params
        if flat_param.trainable
    }
    between = None
    if replicas.world_size > 1:
        inside = None if compressor == DENSE else shard
        between = make_compressor(compressor, Replicas(group=replicas, shards=shards, inside=inside))
    given = {name: parameter.data for name, parameter in model.named_parameters()}
    engine = Engine(model, plan, groups, options, between, trace or Trace())
    if not any(tensor.is_meta for tensor in given.values()):
        engine.load_full(lambda name: given[name])
    return closing(engine)


def batches_of(world_size: int, num_steps: int, accumulation: int) -> Tensor:
    """(steps, micro-batches, ranks, 1, tokens)"""
    generator = torch.Generator().manual_seed(7)
    shape = (num_steps, accumulation, world_size, 1, _TOKENS)
    return torch.randint(0, VOCABULARY, shape, generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def train(
    engine: Engine,
    model: nn.Module,
    batches: Tensor,
    rank: int,
    optimizer: Optimizer = adamw,
    max_norm: float | None = None,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> Run:
    """Train on this rank's part of ``batches``."""
    stepper, losses, gradients, norms = optimizer(engine.param_groups()), [], [], []
    frozen = frozen_bytes(engine)
    for step in batches:
        for number, micro in enumerate(step):
            with engine.micro_batch(last=number == len(step) - 1):
                value = loss(model, micro[rank])
                losses.append(value.item())
                (value / len(step)).backward()
        engine.finish_gradients()
        gradients.append(
            {
                flat_param.name: main.grad.clone()
                for flat_param, main in engine.named_flat_params()
                if main.grad is not None
            }
        )
        if max_norm is not None:
            norms.append(engine.clip_gradients(max_norm))
        stepper.step()
        stepper.zero_grad()
        engine.weights_changed()
    parameters = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    assert frozen_bytes(engine) == frozen
    return Run(losses, gradients, parameters, norms)


def frozen_bytes(engine: Engine) -> dict[str, str]:
    """A digest of the bytes of each frozen shard."""
    shards = engine._shards.frozen.items()
    return {name: hashlib.sha256(shard.encoded.numpy().tobytes()).hexdigest() for name, shard in shards}


def run_groups(groups: list[TrainGroups], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``fn(groups, *args)`` in a thread for each rank; their results in rank order, or the first one's exception."""

    def run_rank(own: TrainGroups) -> Any:
        try:
            return fn(own, *args)
        finally:
            own.close()  # frees the other threads at once when this one raises

    before = set(threading.enumerate())
    results = run_threads([partial(run_rank, own) for own in groups])
    for thread in set(threading.enumerate()) - before:
        if thread.name in ("tightwire-gather", "tightwire-reduce"):
            thread.join(_END_S)
            assert not thread.is_alive(), f"{thread.name} has not ended"
    return results


def run_training(
    model: nn.Module, options: EngineOptions, batches: Tensor, num_nodes: int = 1, per_bucket: int = 1, **how: Any
) -> list[Run]:
    """``train`` by as many ranks as ``batches`` has, each with a copy of ``model``; their traces are checked."""
    models = [copy.deepcopy(model) for _ in range(batches.shape[2])]
    plans = []

    def run_rank(groups: TrainGroups) -> Run:
        own, trace = models[groups.main.rank], Trace()
        with open_engine(own, groups, options, trace=trace, per_bucket=per_bucket) as engine:
            plans.append(engine.plan)
            run = train(engine, own, batches, groups.main.rank, **how)
            check_trace(list(trace.events))
            return run

    runs = run_groups(in_process_train_groups(batches.shape[2], num_nodes), run_rank)
    return _with_whole_gradients(runs, plans[0], num_nodes, options)


def reference(
    model: nn.Module,
    options: EngineOptions,
    batches: Tensor,
    num_nodes: int = 1,
    optimizer: Optimizer = adamw,
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
) -> list[Run]:
    """The expected results of ``run_training``, by rank; gradients and parameters are the same on all."""
    model = copy.deepcopy(model)
    num_ranks = batches.shape[2]
    sharding = options.sharding
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepper = optimizer(list(trainable.values()))
    losses: list[list[float]] = [[] for _ in range(num_ranks)]
    gradients = []
    each_time = {
        n
        for n, p in trainable.items()
        if p.dim() > 1 and ("layers." in n or options.reshard_ends) and sharding.reduce_when == "backward"
    }
    per_node = {"self": 1, "world": num_ranks, "node": num_ranks // num_nodes}[sharding.shard_over]
    for step in batches:
        own = [
            _rank_gradients(model, trainable, step[:, rank], losses[rank], each_time, loss) for rank in range(num_ranks)
        ]
        total = {}
        for name in trainable:
            inside = []
            for first in range(0, num_ranks, per_node):
                ranks = [own[rank][name] for rank in range(first, first + per_node)]
                inside.append(_add([_add(list(params)) for params in zip(*ranks, strict=True)]))
            total[name] = _add(inside) / num_ranks
        for name, parameter in trainable.items():
            parameter.grad = total[name].clone()
        gradients.append(total)
        stepper.step()
    parameters = {name: p.detach().clone() for name, p in trainable.items()}
    return [Run(losses[rank], gradients, parameters, []) for rank in range(num_ranks)]


def assert_same(got: list[Run], want: list[Run]) -> None:
    """To the bit: losses, gradients of every step, parameters at the end."""
    for mine, theirs in zip(got, want, strict=True):
        assert mine.losses == theirs.losses
        for step, (own, other) in enumerate(zip(mine.gradients, theirs.gradients, strict=True)):
            assert own.keys() == other.keys()
            unlike = [name for name in own if not torch.equal(own[name], other[name])]
            assert not unlike, f"gradients of step {step} differ: {unlike}"
        assert mine.parameters.keys() == theirs.parameters.keys()
        unlike = [name for name in mine.parameters if not torch.equal(mine.parameters[name], theirs.parameters[name])]
        assert not unlike, f"parameters differ: {unlike}"


def _rank_gradients(
    model: nn.Module,
    trainable: dict[str, nn.Parameter],
    micro_batches: Tensor,
    losses: list[float],
    each_time: set[str],
    loss: Callable[[nn.Module, Tensor], Tensor],
) -> dict[str, list[Tensor]]:
    """A rank's gradients: added up over micro-batches as autograd does, or one for each where they are summed ``each_time``."""
    gradients: dict[str, list[Tensor]] = {name: [] for name in trainable}
    model.zero_grad()
    for tokens in micro_batches:
        for name in each_time:
            trainable[name].grad = None
        value = loss(model, tokens)
        losses.append(value.item())
        (value / len(micro_batches)).backward()
        for name in each_time:
            gradients[name].append(_grad_of(trainable[name]).clone())
    for name, parameter in trainable.items():
        if name not in each_time:
            gradients[name].append(_grad_of(parameter).clone())
    return gradients


def _grad_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _add(params: list[Tensor]) -> Tensor:
    total = params[0]
    for param in params[1:]:
        total = total + param
    return total


def _with_whole_gradients(runs: list[Run], plan: Any, num_nodes: int, options: EngineOptions) -> list[Run]:
    """The runs with each shard's gradients put together to those of parameters."""
    per_node = options.sharding.shard_ranks(len(runs), num_nodes)
    whole = []
    for rank, run in enumerate(runs):
        first = rank // per_node * per_node
        steps = []
        for step in range(len(run.gradients)):
            named = {}
            for flat_param in plan.flat_params:
                if flat_param.trainable:
                    shards = [runs[other].gradients[step][flat_param.name] for other in range(first, first + per_node)]
                    named |= {param.name: param.of(torch.cat(shards)) for param in flat_param.params}
            steps.append(named)
        whole.append(run._replace(gradients=steps))
    return whole
