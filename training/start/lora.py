"""LoRA: low-rank matrices beside frozen linear layers, as Hugging Face's PEFT computes, names and initializes them.

A layer's output is W x + B A dropout(x) * scale. Source: Hu et al., arXiv 2106.09685; rsLoRA, arXiv 2312.03732.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from tightwire.training.config.lora import LoraConfig

_A, _B = ".lora_A.weight", ".lora_B.weight"


class LoraLinear(nn.Linear):
    """A linear layer with its adapter. The names of its own parameters stay; ``adapts`` False computes the base model."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        on = {"bias": False, "device": base.weight.device}
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, config.rank, **on)
        self.lora_B = nn.Linear(config.rank, base.out_features, **on)
        self.scale, self.dropout, self.adapts = config.scale, config.dropout, True

    def forward(self, input: Tensor) -> Tensor:
        out = linear(input, self.weight, self.bias)
        if not self.adapts:
            return out
        return out + self.lora_B(self.lora_A(dropout(input, self.dropout, self.training))) * self.scale


def add_lora(model: Any, config: LoraConfig) -> None:
    """Give the linear layers of the blocks adapters and freeze everything else. Raises ValueError: a target is not there."""
    model.requires_grad_(False)
    blocks = model.get_submodule("model.layers")
    layers = [(name, module) for name, module in blocks.named_modules() if isinstance(module, nn.Linear)]
    there = sorted({name.rpartition(".")[2] for name, _ in layers})
    if missing := [target for target in config.targets if target not in there]:
        raise ValueError(
            f"model.lora.targets: the blocks have no linear layer {missing[0]}; they have {', '.join(there)}"
        )
    for name, module in layers:
        parent, _, own = name.rpartition(".")
        if not config.targets or own in config.targets:
            setattr(blocks.get_submodule(parent), own, LoraLinear(module, config))


def base_of(name: str) -> str | None:
    """The name of the weight that the matrix ``name`` of an adapter stands beside; None: it is no such matrix."""
    return next((f"{name.removesuffix(half)}.weight" for half in (_A, _B) if name.endswith(half)), None)


def initial_matrix(name: str, base_shape: tuple[int, ...], config: LoraConfig, seed: int) -> Tensor:
    """A: uniform, of PEFT's range, by seed and name. B: zeros, so that the model is unchanged at first."""
    num_outputs, num_inputs = base_shape
    if name.endswith(_B):
        return torch.zeros(num_outputs, config.rank)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator, bound = torch.Generator().manual_seed(int.from_bytes(digest)), 1 / math.sqrt(num_inputs)
    return torch.empty(config.rank, num_inputs).uniform_(-bound, bound, generator=generator)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Compute the base model inside ``with``."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True


def adapter_json(config: LoraConfig, base: str, targets: list[str], saved: list[str]) -> dict[str, Any]:
    """PEFT's ``adapter_config.json``. ``base``: the model that it belongs to. ``saved``: whole modules, of a reward model."""
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if saved else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "lora_dropout": config.dropout,
        "target_modules": targets,
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
