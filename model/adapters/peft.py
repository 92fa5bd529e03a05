"""Opens a PEFT folder (adapter_config.json, adapter_model.safetensors) and refuses by name what cannot be served.

Source: huggingface/peft, ``LoraConfig`` and ``get_pattern_key``.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.model.checkpoint.header import read_json
from tightwire.model.checkpoint.safetensors import SafetensorsReader
from tightwire.model.checkpoint.tensors import StackedParts, stored_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of tensor names
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_[AB]\.weight")
# Fields that do not change how the adapter is applied, or that are read here. Any other field must be off.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    *("alpha_pattern", "lora_alpha", "r", "rank_pattern", "use_rslora", "init_lora_weights", "bias"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
}
# Why a field is refused, for those that people use.
_REFUSED = {
    "use_dora": "DoRA rescales the base weights by a learned magnitude; train with use_dora=False",
    "modules_to_save": "whole modules replace those of the base model; merge the adapter into the base model instead",
    "trainable_token_indices": "token embeddings replace those of the base model; merge the adapter instead",
    "lora_bias": "the adapter has a bias; train with lora_bias=False",
    "fan_in_fan_out": "Llama's matrices are stored (out, in)",
}
# Initializations that subtract from the base weights what the adapter starts with.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFile:
    """An adapter that fits the model. ``modules``: rank and scale of each module that has an adapter."""

    folder: Path
    modules: Mapping[str, tuple[int, float]]
    parts: StackedParts
    reader: SafetensorsReader

    @property
    def rank(self) -> int:
        """The largest rank of all modules."""
        return max(rank for rank, _ in self.modules.values())

    def has(self, module: str) -> bool:
        """True for a module such as ``model.layers.0.self_attn.q_proj`` that the adapter changes."""
        return self.parts.find(module)[0] in self.modules

    def read(self, module: str, rows: range, columns: range) -> tuple[Tensor, Tensor]:
        """Return A (rank, columns) and B (rows, rank) times the scale, both float32. ModelError: they cannot be read."""
        module, part = self.parts.find(module)
        start = 0 if part is None else part.start
        rank, scale = self.modules[module]
        a_RD, b_OR = torch.empty(rank, len(columns)), torch.empty(len(rows), rank)
        half, stored = f"{PREFIX}{module}.lora", range(rows.start + start, rows.stop + start)
        self.reader.read_into(a_RD, f"{half}_A.weight", rows=range(rank), columns=columns)
        self.reader.read_into(b_OR, f"{half}_B.weight", rows=stored)
        return a_RD, b_OR * scale


def open_adapter(folder: Path, config: LlamaConfig, max_rank: int | None = None) -> AdapterFile:
    """Check the folder against the model's shapes. ModelError: what is wrong with it, or is not supported, by name."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not isfile(folder / name):  # false for a path that is too long, and for a pipe, which would never end
            raise ModelError(f"{str(folder)[:500]}: has no {name}; give the folder that PEFT's save_pretrained wrote")
    wrong, damage = f"{CONFIG_FILE}: a value has the wrong type or is invalid", (TypeError, ValueError, AttributeError)
    with naming(f"adapter {folder}", wrong, *damage, OverflowError, RecursionError, re.error):
        settings = read_json(folder / CONFIG_FILE)
        _refuse_unsupported(settings)
        reader = SafetensorsReader(folder, [folder / WEIGHTS_FILE])
        modules = _modules(settings, reader, config)
    adapter = AdapterFile(folder=folder, modules=modules, parts=StackedParts(config), reader=reader)
    if max_rank is not None and adapter.rank > max_rank:
        raise ModelError(
            f"adapter {folder}: its rank is {adapter.rank}, and there is room for {max_rank}; start the server with "
            f"--max-lora-rank {adapter.rank}"
        )
    return adapter


def _refuse_unsupported(settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"peft_type {settings.get('peft_type')!r} is not supported; supported: LORA")
    if (bias := settings.get("bias", "none")) != "none":
        raise ModelError(f"bias={bias!r} is not supported: biases of the base model change; supported: none")
    start = settings.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise ModelError(
            f"init_lora_weights={start!r} is not supported: it changes the base weights; convert the adapter with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for name, value in settings.items():
        if name not in _HARMLESS and value not in (None, False, 0, "", [], {}):
            why = _REFUSED.get(name, "this server does not know it, and it may change the answer")
            raise ModelError(f"{name}={str(value)[:80]} is not supported: {why}")


def _modules(stated: Mapping[str, Any], reader: SafetensorsReader, config: LlamaConfig) -> dict[str, tuple[int, float]]:
    """Rank and scale of each module, from the file's tensors, all of which must be known and complete."""
    stored = {name.removesuffix(".weight"): shape for name, shape in stored_tensors(config).items()}
    shapes = {name: shape for name, shape in stored.items() if ".layers." in name and len(shape) == 2}
    supported = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in shapes))
    modules: dict[str, tuple[int, float]] = {}
    for name in reader.names():
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] not in shapes:
            raise ModelError(
                f"tensor {name} is not supported; supported: lora_A and lora_B of {supported}, in {config.num_layers} layers"
            )
        modules[match["module"]] = _rank_and_scale(stated, match["module"])
    if not modules:
        raise ModelError(f"{WEIGHTS_FILE} has no tensors")
    for module, (rank, _) in modules.items():
        num_outputs, num_inputs = shapes[module]
        for half, want in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            name = f"{PREFIX}{module}.lora_{half}.weight"
            if (shape := reader.shape(name)) != want:
                raise ModelError(f"tensor {name} has shape {shape}; r and the model's configuration require {want}")
    targets, with_tensors = stated.get("target_modules"), {module.rpartition(".")[2] for module in modules}
    for target in targets if isinstance(targets, list) else ():
        if target.rpartition(".")[2] not in with_tensors:
            what = f"{WEIGHTS_FILE} has no tensors of it; supported: {supported}"
            raise ModelError(f"target_modules has {target!r}, but {what}")
    return modules


def _rank_and_scale(settings: Mapping[str, Any], module: str) -> tuple[int, float]:
    rank = _pattern(settings.get("rank_pattern"), module, settings.get("r"))
    alpha = _pattern(settings.get("alpha_pattern"), module, settings.get("lora_alpha"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ModelError(f"{CONFIG_FILE}: r must be a whole number above 0, got {rank!r} for {module}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{CONFIG_FILE}: lora_alpha must be a number, got {alpha!r} for {module}")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the module's name, or after ``^`` all of it."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def adapter_digest(folder: Path) -> str:
    """Return twelve hexadecimal digits of a hash of the adapter's two files. OSError: they cannot be read."""
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]
