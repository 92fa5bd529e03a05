"""LoRA: low-rank matrices beside frozen linear layers, as Hugging Face's PEFT computes, names and initializes them.

A layer's output is W x + B A dropout(x) * scale. Source: Hu et al., arXiv 2106.09685; rsLoRA, arXiv 2312.03732.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from tightwire.training.config.learning import LoraConfig

_A, _B = ".lora_A.weight", ".lora_B.weight"
_CRITIC_A, _CRITIC_B = ".critic_A.weight", ".critic_B.weight"
_HALVES, CRITIC_HEAD = (_A, _B, _CRITIC_A, _CRITIC_B), "lm_head.value.weight"
# What computes a row: the trained adapter, none, or the second adapter of PPO.
Role = Literal["actor", "base", "critic"]
_TRAINED: Sequence[Role] = ("actor", "critic")


class LoraLinear(nn.Linear):
    """A linear layer with its adapters. The names of its own parameters stay. ``roles``: what computes each equal part of the rows."""

    def __init__(self, base: nn.Linear, config: LoraConfig, *, critic: bool = False) -> None:
        on = {"bias": False, "device": base.weight.device}
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Linear(base.in_features, config.rank, **on)
        self.lora_B = nn.Linear(config.rank, base.out_features, **on)
        if critic:
            self.critic_A = nn.Linear(base.in_features, config.rank, **on)
            self.critic_B = nn.Linear(config.rank, base.out_features, **on)
        self.scale, self.dropout, self.roles = config.scale, config.dropout, _TRAINED[: 1 + critic]

    def forward(self, input: Tensor) -> Tensor:
        out = linear(input, self.weight, self.bias)
        if len(self.roles) == 1:
            return self._of(self.roles[0], out, input)
        parts = zip(self.roles, out.chunk(len(self.roles)), input.chunk(len(self.roles)), strict=True)
        return torch.cat([self._of(*part) for part in parts])

    def _of(self, role: Role, out: Tensor, rows: Tensor) -> Tensor:
        """``out``, the frozen layer's of ``rows``, with what the role's adapter adds."""
        if role == "base":
            return out
        down, up = (self.critic_A, self.critic_B) if role == "critic" else (self.lora_A, self.lora_B)
        return out + up(down(dropout(rows, self.dropout, self.training))) * self.scale


class HeadWithCritic(nn.Linear):
    """The head for tokens, and beside it the critic's. Without the critic's rows, which are the last, forward returns the logits.

    ``values``: (B, S), what the newest forward said of the critic's rows.
    """

    values: Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias, self.roles = base.weight, base.bias, _TRAINED
        self.value = nn.Linear(base.in_features, 1, bias=False, device="meta")

    def forward(self, input: Tensor) -> Tensor:
        if self.roles[-1] == "critic":
            *others, critic = input.chunk(len(self.roles))
            self.values, input = self.value(critic)[..., 0].float(), torch.cat(others)
        return linear(input, self.weight, self.bias)


def add_lora(model: Any, config: LoraConfig, *, critic: bool = False) -> None:
    """Give the linear layers of the blocks adapters and freeze everything else. Raises ValueError: a target is not there.

    ``critic``: each has a second one, and the model a critic's head.
    """
    model.requires_grad_(False)
    blocks = model.get_submodule("model.layers")
    layers = [(name, module) for name, module in blocks.named_modules() if isinstance(module, nn.Linear)]
    there = sorted({name.rpartition(".")[2] for name, _ in layers})
    if missing := [target for target in config.targets if target not in there]:
        raise ValueError(f"model.lora.targets: blocks have no linear layer {missing[0]}; they have {', '.join(there)}")
    for name, module in layers:
        parent, _, own = name.rpartition(".")
        if not config.targets or own in config.targets:
            setattr(blocks.get_submodule(parent), own, LoraLinear(module, config, critic=critic))
    if critic:
        model.lm_head = HeadWithCritic(model.lm_head)


def base_of(name: str) -> str | None:
    """The name of the weight that the matrix ``name`` of an adapter stands beside; None: it is no such matrix."""
    return next((f"{name.removesuffix(half)}.weight" for half in _HALVES if name.endswith(half)), None)


def actors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The matrices of the trained adapter."""
    return ((name, tensor) for name, tensor in tensors if name.endswith((_A, _B)))


def critics(tensors: Iterable[tuple[str, Tensor]], head: str) -> Iterator[tuple[str, Tensor]]:
    """The critic's adapter and head as those of a reward model, whose head is named ``head``."""
    names = {_CRITIC_A: _A, _CRITIC_B: _B, CRITIC_HEAD: head}
    for name, tensor in tensors:
        for end, other in names.items():
            if name.endswith(end):
                yield other if end == CRITIC_HEAD else name.replace(end, other), tensor


def initial_matrix(name: str, base_shape: tuple[int, ...], config: LoraConfig, seed: int) -> Tensor:
    """A: uniform, of PEFT's range, by seed and name. B: zeros, so that the model is unchanged at first."""
    num_outputs, num_inputs = base_shape
    if name.endswith((_B, _CRITIC_B)):
        return torch.zeros(num_outputs, config.rank)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator, bound = torch.Generator().manual_seed(int.from_bytes(digest)), 1 / math.sqrt(num_inputs)
    return torch.empty(config.rank, num_inputs).uniform_(-bound, bound, generator=generator)


@contextmanager
def computing(model: Any, *roles: Role) -> Iterator[None]:
    """Inside ``with``, forwards divide their rows into equal parts, one for each role. ``critic`` is the last, if there.

    Without, these are the trained ones, as also in backward, which may compute a block again.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLinear | HeadWithCritic)]
    before = [layer.roles for layer in layers]
    for layer in layers:
        layer.roles = roles
    try:
        yield
    finally:
        for layer, its in zip(layers, before, strict=True):
            layer.roles = its


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
