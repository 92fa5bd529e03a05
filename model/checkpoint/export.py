"""A model's configuration in Hugging Face's form: what ``config_from_hf`` reads back as the same, and transformers opens."""

from typing import Any

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The object of a config.json."""
    exported: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_to_hf(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": config.dtype,
        "bos_token_id": config.bos_token_id,
    }
    if config.eos_token_ids:
        exported["eos_token_id"] = list(config.eos_token_ids)
    return exported


def _rope_to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    rope = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return rope
