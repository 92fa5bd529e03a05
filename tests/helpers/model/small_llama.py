"""A Llama of transformers that trains in milliseconds."""

from collections.abc import Sequence
from typing import Any

import torch
from helpers.training.training_ranks import VOCABULARY
from transformers import LlamaConfig, LlamaForCausalLM

NUM_BLOCKS = 4
_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "use_cache": False,
}


def small_llama(*, frozen: Sequence[str] = (), **overrides: Any) -> LlamaForCausalLM:
    """Seeded; parameters whose name begins with one of ``frozen`` need no gradient."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**_CONFIG, **overrides}))
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not frozen or not name.startswith(tuple(frozen))
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model
