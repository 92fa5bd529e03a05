"""A tiny random model of each family, made by transformers' own classes, as a folder and as a .gguf."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from helpers.model.tiny_gguf import interleave, write_sizes, write_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.header import read_json
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.checkpoint.tensors import gguf_name
from tightwire.model.families import Family

# Three ranks cut groups of query heads, and a window ends inside a block of keys.
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 304,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW: dict[str, Any] = {"sliding_window": 20}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
# What a family's models have beside the sizes; a family without an entry has nothing else.
_OWN: dict[str, dict[str, Any]] = {
    "Mistral": {**_WINDOW, "head_dim": 32},
    "Ministral": {**_WINDOW, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 3},
    "Ministral 3": {
        "head_dim": 32,
        "rope_parameters": {
            **_YARN,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32, "attention_bias": True},
    "Granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
        "logits_scaling": 8.0,
    },
    "Granite 4": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
        "logits_scaling": 8.0,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 1,
    },
    "Phi-3": {**_WINDOW, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 64},
    "OLMo 3": {
        **_WINDOW,
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    "Gemma 2": {**_WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    "Gemma 3": {**_WINDOW, "head_dim": 32, "query_pre_attn_scalar": 32},
}


def make_family_folder(family: Family, folder: Path, **changes: Any) -> Path:
    """Write a float32 model of the family as transformers writes it."""
    settings = {**_SIZES, **_OWN.get(family.names.name, {}), **changes}
    settings[family.mlp_size] = settings["intermediate_size"]
    if "layer_types" in family.defaults:
        settings["layer_types"] = ["full_attention"] * settings["num_hidden_layers"]
    config = AutoConfig.for_model(family.names.model_type, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = _weights(name, parameter.shape, family, generator)
    model.save_pretrained(folder)
    return folder


def _weights(name: str, shape: torch.Size, family: Family, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 - family.fixed.get("norm_offset", 0.0) + 0.1 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    return noise * shape[-1] ** -0.5


def make_family_gguf(family: Family, folder: Path, path: Path) -> Path:
    """Write the folder's model as llama.cpp's converter does, with float32 numbers."""
    from safetensors.torch import load_file

    config = config_from_hf(read_json(folder / "config.json"))
    writer = gguf.GGUFWriter(path, family.names.gguf)
    _write_own_sizes(writer, config, family)
    write_tokenizer(writer, config)
    for name, tensor in _parts_for_gguf(load_file(folder / "model.safetensors"), family):
        own_name = gguf_name(name, config.norms)
        assert own_name is not None, name
        if family.gguf_permuted and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave(tensor, config.head_dim)
        if name.endswith("norm.weight"):
            tensor = tensor + config.norm_offset
        writer.add_tensor(own_name, tensor.contiguous().numpy())
    scaling = config.rope_scaling
    for kind, factors in (("short", scaling.short_factors), ("long", scaling.long_factors)):
        if factors:
            writer.add_tensor(f"rope_factors_{kind}.weight", torch.tensor(factors).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _parts_for_gguf(tensors: dict[str, Tensor], family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield a folder's tensors; stacked ones without a name in GGUF files by their parts, of equal size."""
    for name, tensor in tensors.items():
        module = name.partition(".layers.")[2].partition(".")[2].removesuffix(".weight")
        parts = family.stacked.get(module, ()) if gguf_name(name) is None else ()
        for part, piece in zip(parts, tensor.chunk(len(parts) or 1), strict=False):
            yield name.replace(module, part), piece
        if not parts:
            yield name, tensor


def _write_own_sizes(writer: gguf.GGUFWriter, config: LlamaConfig, family: Family) -> None:
    arch = family.names.gguf
    write_sizes(writer, config)
    if config.window:
        writer.add_sliding_window(config.window)
    for name, key in family.keys.items():
        if key.gguf is not None and (value := getattr(config, name)):
            writer.add_float32(f"{arch}.{key.gguf}", value ** (1 / key.power))
    if config.rope_scaling.kind in ("yarn", "longrope"):
        writer.add_string(f"{arch}.rope.scaling.type", config.rope_scaling.kind)
        writer.add_float32(f"{arch}.rope.scaling.factor", config.rope_scaling.factor)
        writer.add_uint32(f"{arch}.rope.scaling.original_context_length", config.rope_scaling.original_max_positions)
    if arch == "olmo2" and config.rope_scaling.kind == "yarn":  # its converter copies attention_factor of config.json
        writer.add_float32(f"{arch}.rope.scaling.attn_factor", config.rope_scaling.attention_factor)
