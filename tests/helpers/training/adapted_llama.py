"""A small Llama with LoRA adapters whose B is random, so that A has gradients too."""

import torch
from helpers.model.small_llama import small_llama
from torch import nn

from tightwire.training.config.learning import LoraConfig
from tightwire.training.start.lora import CRITIC_HEAD, add_lora, base_of


def adapted_llama(config: LoraConfig, *, critic: bool = False) -> nn.Module:
    """Return ``small_llama`` with the adapters of ``config``; the same numbers each time. ``critic``: of PPO."""
    model = small_llama()
    add_lora(model, config, critic=critic)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in [*model.named_parameters()]:
        if base_of(name) is not None or name == CRITIC_HEAD:
            own = nn.Parameter(0.1 * torch.randn(parameter.shape, generator=generator))
            model.get_submodule(name.rpartition(".")[0]).weight = own
    return model
