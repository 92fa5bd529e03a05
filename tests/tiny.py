"""A tiny Llama made from a seed, as a Hugging Face folder or a .gguf: two layers, a byte tokenizer, under a megabyte."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.checkpoint.tensors import expected_tensors
from tightwire.model.sampling.parameters import BannedText
from tightwire.model.text.tokenizer import (
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    END_OF_TURN,
    END_OF_TURN_ID,
    EOS,
    byte_backend,
)

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 304,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "float32",
    "bos_token_id": BOS_ID,
    "eos_token_id": END_OF_TURN_ID,
}
# Named variants of the configuration that a parity test should go through.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "odd-heads": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "multi-head": {"num_key_value_heads": 4},
    "one-kv-head": {"num_key_value_heads": 1},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True, "attention_bias": True},
    "head-dim": {"head_dim": 32},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope-llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; any key may be overridden. Other ``architectures`` have no ``model_type`` unless given."""
    left_out = "model_type" if "architectures" in overrides else ""
    return {key: value for key, value in _BASE.items() if key != left_out} | overrides


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Seeded weights by Hugging Face name, in float32; large enough that greedy choices are not near-ties."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config_from_hf(config)):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            tensors[name] = 0.1 * noise
        else:
            tensors[name] = noise * (1.0 if "embed" in name else shape[-1] ** -0.5)
    return tensors


def make_tiny(path: Path, *, seed: int = 0, sharded: bool = False, chat: bool = True, **overrides: Any) -> Path:
    """Write the folder ``path`` and return it; ``overrides`` are keys of config.json.

    Weights are stored in the configuration's ``dtype`` (float32 unless overridden).
    """
    config = tiny_config(**overrides)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    dtype = getattr(torch, config["dtype"])
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(config, seed).items()}
    if sharded:
        _save_sharded(path, tensors)
    else:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(path, config["vocab_size"], chat)
    return path


def _save_sharded(path: Path, tensors: dict[str, Tensor]) -> None:
    names = list(tensors)
    shards = {f"model-{i + 1:05d}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, path / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in shards.items() for name in members}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _save_tokenizer(path: Path, vocab_size: int, chat: bool) -> None:
    byte_backend(vocab_size).save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END_OF_TURN,
        "pad_token": EOS,
        "model_max_length": 512,
    }
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def banned_ids(*sequences: Sequence[int]) -> tuple[BannedText, ...]:
    """``bad_words`` that ban these sequences of tokens."""
    return tuple(BannedText(tuple({id_: after} for after, id_ in enumerate(ids, start=1))) for ids in sequences)
