"""Checks a configuration, connects the ranks, and builds the engine and optimizer."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from tightwire.comm.group.group import open_process_group
from tightwire.comm.group.host import available_host_bytes
from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.training.checkpoint.files import flat_shards
from tightwire.training.checkpoint.state import Replica, RunState
from tightwire.training.compression.compressors import Replicas, make_compressor
from tightwire.training.config.tree import ParallelConfig, TrainConfig
from tightwire.training.data.chats import ChatEncoder, ChatPacker, PairPacker, PromptPacker
from tightwire.training.data.sequences import AnyPacker, Packer
from tightwire.training.engine.engine import Engine
from tightwire.training.engine.flat_parameters import BucketPlan, cut_shard
from tightwire.training.engine.gathered_weights import Trace
from tightwire.training.engine.gradients import GradientCompressor
from tightwire.training.engine.options import EngineOptions
from tightwire.training.optimizer import make_optimizer
from tightwire.training.ranks.groups import Control, TrainGroups, open_train_groups, replica_group, shard_group
from tightwire.training.start.loss import next_token_loss
from tightwire.training.start.model import StartingModel, plan_model
from tightwire.training.start.objective import Objective, make_objective


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This rank's connections, and what it keeps to itself until the run's end (``held``), such as the run's folder."""

    groups: TrainGroups
    control: Control
    held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()
        self.control.close()
        self.groups.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The model in training, and the engine and state that hold its parameters."""

    model: Any
    objective: Objective
    engine: Engine
    state: RunState
    device: torch.device


def check_sequences(config: TrainConfig, llama: LlamaConfig) -> None:
    """Raises ValueError: sequences have more tokens than the model has positions."""
    if config.data.sequence_tokens > llama.max_positions:
        raise ValueError(
            f"data.sequence_tokens={config.data.sequence_tokens} is more than the model's {llama.max_positions} positions; "
            f"give at most {llama.max_positions}, or a larger model.shape.max_position_embeddings for a new model"
        )


def find_device(wanted: str, topology: Topology) -> torch.device:
    """Raises ValueError: this host has fewer CUDA devices than ranks."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if topology.local_rank >= count:
        raise ValueError(
            f"rank {topology.rank} is local rank {topology.local_rank} of a host with {count} CUDA devices; start at most one rank "
            "per device, or use device=cpu"
        )
    torch.cuda.set_device(topology.local_rank)
    return torch.device("cuda", topology.local_rank)


def usable_bytes(device: torch.device, ranks_of_host: int) -> int:
    """The memory that one of so many ranks may plan to take: nine tenths of its share of what is free now."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes() // ranks_of_host
    return free * 9 // 10


def connect_ranks(parallel: ParallelConfig, topology: Topology, store: Store, device: torch.device) -> Ranks:
    """Connect all ranks. Raises CollectiveTimeoutError: some ranks did not connect."""
    groups = open_train_groups(topology, store=store, device=device, timeout_s=parallel.timeout_s)
    control = open_process_group(
        topology, store=store, device=torch.device("cpu"), timeout_s=parallel.timeout_s, name="train/control"
    )
    return Ranks(groups=groups, control=Control(control))


def make_trained(
    config: TrainConfig,
    options: EngineOptions,
    start: StartingModel,
    groups: TrainGroups,
    trace: Trace = lambda *_: None,
) -> Trained:
    """Build the model, engine and optimizer, with weights of zero until loaded; ValueError: something does not fit."""
    check_sequences(config, start.config)
    shard_ranks = options.sharding.shard_ranks(groups.world_size, groups.num_nodes)
    model, plan = plan_model(config, start.config, groups.device, shard_ranks)
    model.loss_function = next_token_loss
    weights: dict[str, torch.Tensor] = {}
    compressor = _make_compressor(config, options, plan, groups, weights)
    engine = Engine(model, plan, groups, options, compressor, trace)
    shards = flat_shards(engine)
    weights.update({shard.name: shard.flat_N for shard in shards})
    optimizer = make_optimizer(config.optimizer, engine.param_groups())
    replicas = replica_group(groups.main, options.sharding)
    replica = Replica(replicas.rank, replicas.world_size)
    state = RunState(shards=shards, optimizer=optimizer, compressor=compressor, replica=replica)
    return Trained(model=model, objective=make_objective(config), engine=engine, state=state, device=groups.device)


def make_packer(config: TrainConfig, start: StartingModel) -> AnyPacker:
    """What makes sequences of the run's documents. Raises ValueError: messages, and the model has no chat template."""
    tokenizer, size, kind = start.tokenizer, config.data.sequence_tokens, config.data.kind
    encode = partial(tokenizer.encode, add_special_tokens=False)
    if kind == "text":
        return Packer(encode, size, start.end_token_id)
    if tokenizer.chat_template is None:
        raise ValueError(f"data.kind={kind}: {start.name} has no chat template; start from an instruct model")
    chats = ChatEncoder(tokenizer.render_chat, encode, tokenizer.eos_token_ids)
    if kind == "prompts":
        return PromptPacker(chats, size, config.answers.answer_tokens)
    given = chats, size, start.end_token_id
    if kind == "preferences":
        return PairPacker(*given, scored=start.head == "reward")
    return ChatPacker(*given, recorded=kind == "distill")


def _make_compressor(
    config: TrainConfig, options: EngineOptions, plan: BucketPlan, groups: TrainGroups, weights: dict[str, torch.Tensor]
) -> GradientCompressor | None:
    """``weights``: the shards by flat parameter; the caller fills it after it has built the engine."""
    replicas = replica_group(groups.reduce, options.sharding)
    if replicas.world_size == 1:
        return None
    inside = shard_group(groups.reduce, options.sharding)
    shards = {own.name: cut_shard(own, inside.rank, inside.world_size) for own in plan.trainable}
    given = Replicas(group=replicas, shards=shards, inside=inside, weights=lambda name: weights[name].detach())
    return make_compressor(config.parallel.between, given)
