"""Runs an arm's training steps on one rank: with the engine, or with torch's data parallelism on gloo."""

import math
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tightwire.bench.train.options import ARMS, TrainBenchOptions, config_of_arm
from tightwire.training.config.optimizer import OptimizerConfig
from tightwire.training.estimate.step_time import Computing
from tightwire.training.optimizer import make_optimizer
from tightwire.training.ranks.groups import TrainGroups
from tightwire.training.run.setup import make_trained
from tightwire.training.start.model import StartingModel, build_model

_MAX_NORM = 1.0


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

    def __init__(self, name: str, options: TrainBenchOptions, start: StartingModel, groups: TrainGroups) -> None:
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

    def __init__(self, name: str, options: TrainBenchOptions, start: StartingModel) -> None:
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


def make_trainee(name: str, options: TrainBenchOptions, start: StartingModel, groups: TrainGroups) -> Trainee:
    """``groups``: of the engine's arms; torch's arms use torch's default group."""
    return PeerTrainee(name, options, start) if ARMS[name].peer else EngineTrainee(name, options, start, groups)


def draw_tokens(options: TrainBenchOptions, vocab_size: int, rank: int, step: int) -> Tensor:
    """Random tokens, the same in every arm. At most 256 different ids, so that the loss can fall."""
    source = torch.Generator().manual_seed((options.seed * 1_000_003 + step) * 1_009 + rank)
    return torch.randint(0, min(256, vocab_size), (options.sequences, options.sequence_tokens + 1), generator=source)
