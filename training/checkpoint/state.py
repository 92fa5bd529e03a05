"""Collects a run's state as chunks and restores it, from a checkpoint that belongs to the run: weights, optimizer, gradient compressor.

Frozen weights are not in it: a run reads them from its starting model.
State is keyed by parameter name, so a run with another sharding can read it. State that each replica keeps for
itself (residuals, velocities) has the replica's number in its key; if the number of replicas has changed, every new
replica gets the mean of the old ones, which preserves the mean they send. What training draws after the start
depends on the seed and the step alone, so there are no random states.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

import tightwire
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.training.checkpoint.files import Chunk, FlatShard, chunks_of, keys_in, read_chunks
from tightwire.training.checkpoint.folders import OtherRunError, read_description
from tightwire.training.config.tree import TrainConfig
from tightwire.training.engine.gradients import GradientCompressor
from tightwire.training.optimizer import names_of_state
from tightwire.training.start.model import StartingModel

_OPTIMIZER, _PARAMETERS, _BETWEEN = "optimizer", "parameters", "between"


class Replica(NamedTuple):
    """This rank's position among the ranks that hold the same shards."""

    rank: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """References to everything that changes from step to step."""

    shards: Sequence[FlatShard]
    optimizer: Optimizer
    compressor: GradientCompressor | None
    replica: Replica

    @property
    def compressor_state(self) -> dict[str, Tensor]:
        return {} if self.compressor is None else self.compressor.state_dict()


def snapshot(state: RunState) -> list[Chunk]:
    """Copies in host memory of what this rank writes; replicas divide the shards they share."""
    own = [shard for number, shard in enumerate(state.shards) if number % state.replica.size == state.replica.rank]
    chunks = [
        *_parameter_chunks(own),
        *_optimizer_chunks(state.optimizer, own),
        *_compressor_chunks(state.shards, state.compressor_state, state.replica.rank),
    ]
    return [chunk._replace(numbers=chunk.numbers.detach().to("cpu", copy=True)) for chunk in chunks]


def find_not_finite(state: RunState) -> list[str]:
    """Flat parameters with inf or NaN on this rank, in weights, optimizer state or compressor state. Cost: reads all of it once."""
    numbers = [(key.partition("/")[2], value) for key, value in state.compressor_state.items()]
    for shard in state.shards:
        numbers.append((shard.name, shard.flat_N.detach()))
        flats = state.optimizer.state.get(shard.flat_N, {}).values()
        numbers += [(shard.name, value) for value in flats if isinstance(value, Tensor)]
    return sorted({name for name, value in numbers if not value.isfinite().all()})


def scalars_of(state: RunState) -> dict[str, Any]:
    """The scalar state for the checkpoint's JSON, such as AdamW's step count by flat parameter; equal on every rank."""
    optimizer = state.optimizer.state
    return {
        "optimizer": {
            shard.name: {
                name: float(value)
                for name, value in optimizer[shard.flat_N].items()
                if not _is_flat(value, shard) and value is not None
            }
            for shard in state.shards
            if shard.flat_N in optimizer
        },
        "between": {key: value.item() for key, value in state.compressor_state.items() if "/" not in key},
    }


def wanted_state(state: RunState, scalars: Mapping[str, Any], keys: Mapping[str, int]) -> list[Chunk]:
    """Destinations for weights and optimizer state. Restores the optimizer's scalars and allocates its flat state.

    ``keys``: all keys of the checkpoint with their lengths; they determine which flat state exists.
    """
    flat_names = {key.split("/")[1] for key in keys if key.startswith(f"{_OPTIMIZER}/")}
    for shard in state.shards:
        if (kept := scalars["optimizer"].get(shard.name)) is not None:
            # Torch's optimizers keep scalar state, such as step counts, as tensors, with these options beside the weights.
            beside = any(map(state.optimizer.defaults.get, ("fused", "capturable")))
            place = shard.flat_N.device if beside else torch.device("cpu")
            own: dict[str, Any] = {key: torch.tensor(value, device=place) for key, value in kept.items()}
            own |= {name: torch.zeros_like(shard.flat_N) for name in flat_names}
            state.optimizer.state[shard.flat_N] = own
    return [*_parameter_chunks(state.shards), *_optimizer_chunks(state.optimizer, state.shards)]


def _parameter_chunks(shards: Sequence[FlatShard]) -> Iterator[Chunk]:
    return (chunk for shard in shards for chunk in chunks_of(_PARAMETERS, shard, shard.flat_N))


def _optimizer_chunks(optimizer: Optimizer, shards: Sequence[FlatShard]) -> Iterator[Chunk]:
    """State tensors of the same shape as the shards, such as AdamW's moments."""
    for shard in shards:
        for name, value in optimizer.state.get(shard.flat_N, {}).items():
            if _is_flat(value, shard):
                yield from chunks_of(f"{_OPTIMIZER}/{name}", shard, value)


def _compressor_chunks(shards: Sequence[FlatShard], state: Mapping[str, Tensor], replica: int) -> Iterator[Chunk]:
    by_name = {shard.name: shard for shard in shards}
    for key, value in state.items():
        kind, slash, name = key.partition("/")
        if slash:
            yield from chunks_of(f"{_BETWEEN}/{kind}/{replica}", by_name[name], value)


def _is_flat(value: Any, shard: FlatShard) -> bool:
    return isinstance(value, Tensor) and value.shape == shard.flat_N.shape


# Besides the seed and the files, these options determine the order of the data.
_ORDER = ("kind", "text_key", "parted_by", "held_out", "held_out_files", "sequence_tokens", "shuffle_documents")


class Identity(NamedTuple):
    """What a checkpoint and the run that resumes from it must have in common."""

    model: Mapping[str, Any]
    order: Mapping[str, Any]
    start: str  # a fingerprint of the starting model's weights


def identity_of(config: TrainConfig, start: StartingModel, *, files: str) -> Identity:
    """``files``: a fingerprint of the data files."""
    data, in_hf = config.model_dump(mode="json")["data"], config_to_hf(start.config)
    sizes = {key: value for key, value in in_hf.items() if key not in ("torch_dtype", "architectures")}
    if config.model.lora is not None:
        sizes["lora"] = config.model.lora.model_dump(exclude={"dropout"})
    if config.head != "tokens":
        sizes["head"] = config.head
    if config.distill is not None or config.model.layers:
        sizes |= {
            "distill": config.distill and config.distill.model_dump(exclude={"answers"}),
            "layers": config.model.layers,
        }
    data["held_out_files"] = bool(data["held_out_files"])  # older checkpoints name them
    order = {"seed": config.seed, "files": files, **{key: data[key] for key in _ORDER}}
    return Identity(model={"name": start.name, **sizes}, order=order, start=start.fingerprint)


def describe_checkpoint(
    config: TrainConfig, identity: Identity, state: RunState, *, frozen_sum: int, step: int, position: int
) -> dict[str, Any]:
    """The JSON description stored in a checkpoint beside its tensors."""
    return {
        "step": step,
        "position": position,
        **identity._asdict(),
        "frozen_sum": frozen_sum,
        "optimizer": config.optimizer.torch_name,
        "between": config.parallel.between.kind,
        "replicas": state.replica.size,
        "scalars": scalars_of(state),
        "config": config.model_dump(mode="json"),
        "versions": {"tightwire": tightwire.__version__, "torch": torch.__version__},
    }


def check_checkpoint(folder: Path, identity: Identity, config: TrainConfig) -> dict[str, Any]:
    """The checkpoint's description, after checking that this run can resume from it.

    Raises CheckpointError: the description is missing or damaged; OtherRunError: model, data order, optimizer,
    compressor or ``schedule.steps`` do not fit.
    """
    description = read_description(folder)
    differing = _difference(description["model"], identity.model)
    is_renamed = description["config"]["model"]["start"] != config.model.start  # under one name weights may change
    if is_renamed and description.get("start", identity.start) != identity.start:
        differing = differing or f"model.start={config.model.start} has other weights than its run began with"
    if differing:
        names = description["model"]["name"], identity.model["name"]
        named = " ({}, not {})".format(*names) if names[0] != names[1] else ""
        raise OtherRunError(
            f"{folder} is a checkpoint of another model{named}: {differing}. Give another `run`, or the checkpoint's model"
        )
    its_order = description["order"] | {"held_out_files": bool(description["order"]["held_out_files"])}
    if differing := _difference(its_order, identity.order):
        raise OtherRunError(
            f"{folder}: the order of the data would differ: {differing}. Restore that value, or start a new `run` from "
            "the exported model (model.start)"
        )
    for name, own in (("optimizer", config.optimizer.torch_name), ("between", config.parallel.between.kind)):
        if (its := description[name]) != own:
            raise OtherRunError(f"{folder} has {name} {its}, but this run has {own}; use {its}, or another `run`")
    kept, own = (_about_answers(each) for each in (description["config"], config.model_dump(mode="json")))
    if description.get("answers") and (differing := _difference(kept, own)):
        raise OtherRunError(
            f"{folder} has answers that the next steps learn from, and {differing}; restore it until a rollout's last step, or give another `run`"
        )
    if description["step"] > config.schedule.steps:
        raise OtherRunError(
            f"{folder} has more steps than schedule.steps={config.schedule.steps}; give at least "
            f"{description['step']}, or another `run`"
        )
    return description


def _about_answers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say which answers a step learns from."""
    own = config["ppo"] or config["grpo"]
    names = own.keys() & {"samples", "updates", "epochs", "minibatches", "temperature"}
    return {"batch.sequences": config["batch"]["sequences"], **{name: own[name] for name in names}}


def restore(folder: Path, description: Mapping[str, Any], state: RunState) -> None:
    """Restore weights, optimizer and gradient compressor from a checked checkpoint. Not collective.

    Raises CheckpointError: files cannot be read; OtherRunError: other parameters, or not the same ones are trained.
    """
    keys = keys_in(folder)
    _check_parameters(folder, state.shards, keys, description["config"]["model"]["frozen"])
    its = description["config"]["optimizer"]["options"]
    for kept in description["scalars"]["optimizer"].values():
        there = {*kept, *(key.split("/")[1] for key in keys if key.startswith(f"{_OPTIMIZER}/"))}
        if missing := sorted(names_of_state(state.optimizer) - there):
            raise OtherRunError(
                f"{folder} has no {' and no '.join(missing)} of the optimizer, which optimizer.options need here; restore those of its "
                f"run, {its}, or start a new `run` from the exported model (model.start)"
            )
    with torch.no_grad():
        read_chunks(folder, wanted_state(state, description["scalars"], keys))
        _restore_compressor(folder, description, state)


def _restore_compressor(folder: Path, description: Mapping[str, Any], state: RunState) -> None:
    """Restore what replicas keep for themselves; from another number of replicas, each gets the mean."""
    scalars, saved_replicas = description["scalars"]["between"], description["replicas"]
    if state.compressor is None or not scalars:
        return
    replicas = [state.replica.rank] if saved_replicas == state.replica.size else range(saved_replicas)
    kept = {key: value for key, value in state.compressor_state.items() if "/" in key}
    saved = {replica: {key: torch.zeros_like(value) for key, value in kept.items()} for replica in replicas}
    chunks = [chunk for replica, own in saved.items() for chunk in _compressor_chunks(state.shards, own, replica)]
    read_chunks(folder, chunks)
    first, *others = saved.values()
    # In float64, so that the mean of equal values is exactly that value.
    means = {
        key: sum((other[key].double() for other in others), value.double()).div(1 + len(others)).to(value.dtype)
        for key, value in first.items()
    }
    state.compressor.load_state_dict(means | {key: torch.tensor(value) for key, value in scalars.items()})


def _check_parameters(
    folder: Path, shards: Sequence[FlatShard], keys: Mapping[str, int], frozen_there: Sequence[str]
) -> None:
    """Check that the same parameters, of the same sizes, are trained here and there."""
    prefix = f"{_PARAMETERS}/"
    there = {key.removeprefix(prefix): length for key, length in keys.items() if key.startswith(prefix)}
    here = {span.param.name: span.param.num_elems for shard in shards for span in shard.layout.spans}
    if frozen_here := there.keys() - here.keys():
        raise OtherRunError(
            f"{folder} has trained weights of {min(frozen_here)}, which is not trained here (model.frozen): train it here too, "
            "or start a new `run` from the exported model (model.start)"
        )
    for name, num_elems in here.items():
        if name not in there:
            raise OtherRunError(
                f"{folder} has no weights of {name}, which was frozen (model.frozen={list(frozen_there)}): freeze "
                "it here too, or start a new `run` from the exported model (model.start)"
            )
        if there[name] != num_elems:
            raise OtherRunError(
                f"{folder} is a checkpoint of another model: {name} has {num_elems} elements here, but {there[name]} elements in "
                "the checkpoint"
            )


def _difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Describe the first difference, ignoring ``name``; "" if there is none."""
    for key in sorted({*saved, *own} - {"name"}):
        if saved.get(key) != own.get(key):
            return f"{key} is {saved.get(key)} in the checkpoint and {own.get(key)} here"
    return ""
