"""Trains with torch's data parallelism on gloo, with the same modules, weights, batches and optimizer."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tightwire.bench.train.arms import Arm
from tightwire.bench.train.options import TrainBenchOptions
from tightwire.bench.train.trainee import MAX_NORM, StepTimes, loss_of
from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.optimizer.make import make_optimizer
from tightwire.training.start.model import StartingModel, build_model

_CPU = torch.device("cpu")


class PeerTrainee:
    """``ddp``: DistributedDataParallel. ``fsdp2``: fully_shard of each block and of the rest, weights freed after forward.

    With bfloat16, FSDP2 computes in bfloat16 and sums in float32, as the engine does; DDP supports only float32 here.
    """

    def __init__(self, arm: Arm, options: TrainBenchOptions, start: StartingModel) -> None:
        model = _with_weights(build_model(start.config, device=_CPU), start)
        if arm.peer == "fsdp2":
            dtype = getattr(torch, options.dtype)
            how: dict[str, Any] = {
                "mesh": init_device_mesh("cpu", (options.world_size,)),
                "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            }
            for block in model.model.layers:
                fully_shard(block, **how)
            fully_shard(model, **how)
            self._model: Any = model
        else:
            self._model = DistributedDataParallel(model)
        self._optimizer = make_optimizer(OptimizerConfig(**arm.optimizer), _param_groups(model))
        self._model.train()

    def step(self, tokens_BS: Tensor) -> StepTimes:
        begun = time.perf_counter()
        loss = loss_of(self._model, tokens_BS)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepTimes(
            loss=float(loss.detach()),
            forward_s=forward - begun,
            backward_s=backward - forward,
            rest_s=time.perf_counter() - backward,
            waited_s=None,
        )

    def close(self) -> None:
        pass


def _with_weights(model: Any, start: StartingModel) -> Any:
    """Replace the meta parameters with loaded ones; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(start.read(f"{module_name}.{name}"))
            setattr(module, name, made[id(parameter)])
    return model


def _param_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "name": "matrices"},
        {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "name": "norms"},
    ]
