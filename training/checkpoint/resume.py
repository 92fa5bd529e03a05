"""Finds the checkpoint to resume from, checks that it belongs to this run, and restores it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tightwire
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.hf_config import config_to_hf
from tightwire.training.checkpoint.files import FlatShard, keys_in, read_chunks
from tightwire.training.checkpoint.folders import OtherRunError, read_description
from tightwire.training.checkpoint.state import CompressorReader, RunState, parameters_in, scalars_of, wanted_state
from tightwire.training.config.tree import TrainConfig

# Besides the seed and the files, these options determine the order of the data.
_ORDER = ("kind", "text_key", "parted_by", "held_out", "held_out_files", "sequence_tokens", "shuffle_documents")


class Identity(NamedTuple):
    """What a checkpoint and the run that resumes from it must have in common."""

    model: Mapping[str, Any]
    order: Mapping[str, Any]


def identity_of(config: TrainConfig, llama: LlamaConfig, *, name: str, files: str) -> Identity:
    """``files``: a fingerprint of the data files."""
    data = config.model_dump(mode="json")["data"]
    sizes = {key: value for key, value in config_to_hf(llama).items() if key not in ("torch_dtype", "architectures")}
    if config.model.lora is not None:
        sizes["lora"] = config.model.lora.model_dump(exclude={"dropout"})
    if config.head != "tokens":
        sizes["head"] = config.head
    if config.distill is not None or config.model.layers:
        sizes |= {
            "distill": config.distill and config.distill.model_dump(exclude={"answers"}),
            "layers": config.model.layers,
        }
    return Identity(
        model={"name": name, **sizes}, order={"seed": config.seed, "files": files, **{key: data[key] for key in _ORDER}}
    )


def describe_checkpoint(
    config: TrainConfig, identity: Identity, state: RunState, *, frozen_sum: int, step: int, position: int
) -> dict[str, Any]:
    """The JSON description stored in a checkpoint beside its tensors."""
    return {
        "step": step,
        "position": position,
        "model": dict(identity.model),
        "order": dict(identity.order),
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
    if differing := _difference(description["model"], identity.model):
        names = description["model"]["name"], identity.model["name"]
        named = " ({}, not {})".format(*names) if names[0] != names[1] else ""
        raise OtherRunError(
            f"{folder} is a checkpoint of another model{named}: {differing}. Give another `run`, or the "
            "checkpoint's model"
        )
    if differing := _difference(description["order"], identity.order):
        raise OtherRunError(
            f"{folder}: the order of the data would differ: {differing}. Restore that value, or start a new `run` from "
            "the exported model (model.start)"
        )
    for name, own in (("optimizer", config.optimizer.torch_name), ("between", config.parallel.between.kind)):
        if (its := description[name]) != own:
            raise OtherRunError(
                f"{folder} was written with {name} {its}, but this run has {own}; use {its}, or another `run`"
            )
    if description["step"] > config.schedule.steps:
        raise OtherRunError(
            f"{folder} has more steps than schedule.steps={config.schedule.steps}; give at least "
            f"{description['step']}, or another `run`"
        )
    return description


def restore(folder: Path, description: Mapping[str, Any], state: RunState) -> None:
    """Restore weights, optimizer and gradient compressor from a checked checkpoint. Not collective.

    Raises CheckpointError: files cannot be read; OtherRunError: other parameters, or not the same ones are trained.
    """
    keys, scalars = keys_in(folder), description["scalars"]
    _check_parameters(folder, state.shards, parameters_in(keys), description["config"]["model"]["frozen"])
    wanted, reader = wanted_state(state, scalars, keys), None
    if state.compressor is not None and scalars["between"]:
        reader = CompressorReader(state, scalars, saved_replicas=description["replicas"])
        wanted += reader.wanted()
    with torch.no_grad():
        read_chunks(folder, wanted)
    if reader is not None:
        reader.load()


def check_frozen(folder: Path, description: Mapping[str, Any], frozen_sum: int) -> None:
    """Raises OtherRunError: the frozen weights, which are read from the starting model, are not those of the checkpoint's run."""
    if description["frozen_sum"] != frozen_sum:
        raise OtherRunError(
            f"{folder} was trained beside other frozen weights than {description['model']['name']} has now; restore its files, "
            "or give another `run`"
        )


def _check_parameters(
    folder: Path, shards: Sequence[FlatShard], there: Mapping[str, int], frozen_there: Sequence[str]
) -> None:
    """Check that the same parameters, of the same sizes, are trained here and there."""
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
