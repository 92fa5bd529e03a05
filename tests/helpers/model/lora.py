"""Random LoRA adapters as PEFT writes them, without PEFT, and a base model with an adapter merged into its weights."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.tensors import stored_tensors

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    config: LlamaConfig,
    *,
    rank: int = 4,
    alpha: float = 16,
    targets: Sequence[str] = ALL_TARGETS,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter whose answers differ clearly from the base model's. ``ranks``: of targets with another rank."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in stored_tensors(config).items():
        module = name.removesuffix(".weight")
        target = module.rpartition(".")[2]
        if target not in targets or not name.endswith(".weight"):
            continue
        own = (ranks or {}).get(target, rank)
        scale = alpha / (math.sqrt(own) if settings.get("use_rslora") else own)
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(own, shape[1], generator=generator) / math.sqrt(shape[1])
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(shape[0], own, generator=generator) / (scale * math.sqrt(own))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "rank_pattern": dict(ranks or {}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def merge_adapter(base: Path, adapter: Path, folder: Path) -> Path:
    """Write the float32 folder ``base`` with the adapter added to its weights."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    tensors, added = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a_RD in added.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        root = math.sqrt(len(a_RD)) if settings["use_rslora"] else len(a_RD)
        b_OR = added[name.replace("lora_A", "lora_B")]
        tensors[f"{module}.weight"] += (b_OR.double() @ a_RD.double() * settings["lora_alpha"] / root).float()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in base.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
