"""Runs steps in rank processes with the engine and with torch's data parallelism, with the same model and batches.

Groups of one, two and four ranks are made of the same four processes, as starting them takes longest.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from helpers.training.keyword_model import KeywordModel, keyword_loss
from helpers.training.training_ranks import batches_of, open_engine
from torch import Tensor, nn
from torch.distributed import FileStore, GradBucket, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tightwire.comm.group.group import Group
from tightwire.comm.group.topology import Topology
from tightwire.training.config.sharding import SHARDINGS
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import cut_shard
from tightwire.training.engine.options import EngineOptions
from tightwire.training.ranks.groups import open_train_groups

Named = dict[str, tuple[int, Tensor]]  # by parameter: from which element on, and flat


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of ours, and what torch's must be like it. ``rich``: tied, frozen and recomputed, with micro-batches."""

    world_size: int
    sharding: str
    rich: bool

    @property
    def num_nodes(self) -> int:
        return 2 if self.sharding == "hybrid" else 1

    @property
    def accumulation(self) -> int:
        return 3 if self.rich else 1

    @property
    def options(self) -> EngineOptions:
        return replace(EngineOptions(), sharding=SHARDINGS[self.sharding], checkpoint_blocks=9 * self.rich)

    @property
    def is_exact(self) -> bool:
        """Whether DDP adds in the same order: the others add ranks before micro-batches."""
        return not self.rich or self.options.sharding.reduce_when == "step" or self.world_size == 1


class Trained(NamedTuple):
    """``gradients`` by step; the engine's are those of this rank's shard, of parameters that have any."""

    losses: list[float]
    gradients: list[Named]
    parameters: Named


def beside_torch(group: Group, folder: str, num_steps: int, cases: list[Case]) -> None:
    """Train every case that this rank is one of by DDP, by FSDP2 and by the engine, and compare them."""
    torch.set_num_threads(1)
    store = FileStore(f"{folder}/torch", group.world_size)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.world_size)
    subgroups: dict[int, Any] = {
        size: dist.new_group(list(range(size))) for size in sorted({case.world_size for case in cases})
    }
    for number, case in enumerate(cases):
        if group.rank < case.world_size:
            model, batches = _model(case), batches_of(case.world_size, num_steps, case.accumulation)
            ours = _train_engine(group, f"{folder}/{number}", case, copy.deepcopy(model), batches)
            ddp = _train_ddp(subgroups[case.world_size], case, copy.deepcopy(model), batches, group.rank)
            _compare(ours, ddp, case, tolerance=0.0 if case.is_exact else 1e-6)
            if case.sharding == "zero3":
                fsdp2 = _train_fsdp2(subgroups[case.world_size], copy.deepcopy(model), batches, group.rank)
                _compare(ours, fsdp2, case, tolerance=1e-6)
    group.transport.barrier()
    dist.destroy_process_group()


def _model(case: Case) -> KeywordModel:
    model = KeywordModel()
    if case.rich:
        model.head.weight = model.embedding.weight
        for name in ("layers.0", "layers.2.left"):
            model.get_submodule(name).requires_grad_(False)
    return model


def _compare(ours: Trained, theirs: Trained, case: Case, tolerance: float) -> None:
    def alike(own: Tensor, other: Tensor) -> bool:
        return torch.allclose(own, other, rtol=tolerance, atol=tolerance)

    assert alike(torch.tensor(ours.losses), torch.tensor(theirs.losses)), (case, ours.losses, theirs.losses)
    for step, (own, other) in enumerate(
        zip([*ours.gradients, ours.parameters], [*theirs.gradients, theirs.parameters], strict=True)
    ):
        unlike = []
        for name, (start, span) in own.items():
            first, whole = other[name]
            if not alike(span, whole[start - first : start - first + span.numel()]):
                unlike.append(name)
        assert own and not unlike, f"{case}, step {step}: {unlike}"


def _train_engine(group: Group, path: str, case: Case, model: nn.Module, batches: Tensor) -> Trained:
    topology = Topology(group.rank, case.world_size, num_nodes=case.num_nodes)
    store = FileStore(path, case.world_size)
    groups = open_train_groups(topology, store=store, device=group.device, timeout_s=group.timeout_s)
    losses, gradients = [], []
    with open_engine(model, groups, case.options) as engine:
        optimizer = _sgd(engine.param_groups())
        for step in batches:
            for number, micro in enumerate(step):
                with engine.micro_batch(last=number == len(step) - 1):
                    losses.append(_backward(model, micro[group.rank], len(step)))
            engine.finish_gradients()
            gradients.append(dict(_gradient_pieces(engine)))
            optimizer.step()
            engine.weights_changed()
        parameters = {name: (0, tensor.clone().view(-1)) for name, tensor in engine.full_tensors()}
    return Trained(losses, gradients, parameters)


def _gradient_pieces(engine: Engine) -> Iterator[tuple[str, tuple[int, Tensor]]]:
    for flat_param, main in engine.named_flat_params():
        if main.grad is not None:
            for span in cut_shard(flat_param, engine.shard_rank, engine.plan.shard_ranks).spans:
                yield span.param.name, (span.offset, main.grad[span.place].clone())


def _train_ddp(group: ProcessGroup, case: Case, model: nn.Module, batches: Tensor, rank: int) -> Trained:
    """With a hook that adds in rank order, the ranks of a node first; micro-batches are added up before."""
    ranks_per_node = case.world_size // case.num_nodes

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        own = bucket.buffer()
        params = [torch.empty_like(own) for _ in range(case.world_size)]
        dist.all_gather(params, own, group=group)
        nodes = [_add(params[first : first + ranks_per_node]) for first in range(0, len(params), ranks_per_node)]
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(_add(nodes) / len(params))
        return done

    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(None, hook)
    return _train(ddp, model, batches, rank)


def _train_fsdp2(group: ProcessGroup, model: Any, batches: Tensor, rank: int) -> Trained:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model, model, batches, rank)


def _train(wrapped: nn.Module, model: nn.Module, batches: Tensor, rank: int) -> Trained:
    optimizer, losses, gradients = _sgd(model.parameters()), [], []
    for step in batches:
        for number, micro in enumerate(step):
            is_last = number == len(step) - 1
            # FSDP2 sums over ranks in every micro-batch, DDP when told to.
            with nullcontext() if is_last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync():
                losses.append(_backward(wrapped, micro[rank], len(step)))
        named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
        gradients.append({name: (0, _whole(grad)) for name, grad in named if grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: (0, _whole(parameter.detach())) for name, parameter in model.named_parameters()}
    return Trained(losses, gradients, parameters)


def _backward(model: nn.Module, tokens: Tensor, num_micro_batches: int) -> float:
    loss = keyword_loss(model, tokens)
    (loss / num_micro_batches).backward()
    return loss.item()


def _sgd(params: Any) -> torch.optim.Optimizer:
    # Adam would turn a rounding of a number near zero into a step of full length.
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten().clone()


def _add(params: list[Tensor]) -> Tensor:
    total = params[0].clone()
    for param in params[1:]:
        total += param
    return total
