"""The table of model families: what their layers compute, and how their files name it. A new family is one entry here.

An entry says which fields of ``LlamaConfig``, the one description that all kernels follow, differ from Llama's. Nothing
else asks for a family by name. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple


class Key(NamedTuple):
    """Where files keep a field: the keys of config.json and of GGUF (without the architecture); None: not at all."""

    hf: str | None
    gguf: str | None = None
    power: float = 1.0  # the field is the file's number to this power


class Names(NamedTuple):
    """What a family is called: by us, in ``architectures`` and ``model_type`` of config.json, and in GGUF files."""

    name: str
    architecture: str
    model_type: str
    gguf: str


Fields = Mapping[str, Any]  # of ``LlamaConfig``, those read so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One entry. ``fixed``: fields with one value in all models, or computed from the others."""

    names: Names
    gguf_permuted: bool = False  # llama.cpp interleaves the halves of q's and k's heads
    keys: Mapping[str, Key] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    gguf_fixed: Mapping[str, Callable[[Fields], Any]] = field(default_factory=dict)  # what GGUF files leave out
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys of config.json that a file may leave out
    # Of so many layers the last one attends to all tokens and the others to a window; 1: all have the window; 0: none has.
    full_every: int = 0
    uniform: bool = False  # ``layer_types`` says nothing: ``full_every`` decides, as in transformers
    nope_every: int = 0  # of so many layers the last one has no rotary embedding; 0: all have one
    partial_rotary: bool = False  # ``partial_rotary_factor`` may be below 1
    mlp_size: str = "intermediate_size"  # its key in config.json
    # Keys of config.json that must have one value, and the feature that a model with another one, or none, has.
    required: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)  # further keys, which transformers checks
    # Matrices that config.json's files keep stacked by rows, or name otherwise: their name, and its parts in order.
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_ATTENTION_BIAS = {"qkv_bias": Key("attention_bias"), "output_bias": Key("attention_bias")}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": Key("mlp_bias")}
_MISTRAL_DEFAULTS = {"max_position_embeddings": 131072, "sliding_window": 4096}
_MISTRAL: Any = {"gguf_permuted": True, "full_every": 1, "defaults": _MISTRAL_DEFAULTS}
_YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "attention_factor": 1.0}
_MINISTRAL_SIZES = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 1e6}
_MINISTRAL_3 = {**_MISTRAL, "defaults": {**_MINISTRAL_SIZES, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}}}
_GRANITE = {
    "embedding_scale": Key("embedding_multiplier", "embedding_scale"),
    "residual_scale": Key("residual_multiplier", "residual_scale"),
    "score_scale": Key("attention_multiplier", "attention.scale"),
    "logits_divisor": Key("logits_scaling", "logit_scale"),
}
_GRANITE_DEFAULTS = {"attention_multiplier": 1.0}  # without the key, transformers multiplies scores by 1
_OLMO: Mapping[str, Any] = {"norms": "after", "qk_norm": "projection"}
_GEMMA: Mapping[str, Any] = {
    "norms": "both",
    "norm_offset": 1.0,
    "activation": "gelu_tanh",
    "embedding_scale": lambda fields: fields["hidden_size"] ** 0.5,
}
_GEMMA_KEYS = {
    **_ATTENTION_BIAS,
    "score_scale": Key("query_pre_attn_scalar", power=-0.5),
    "logits_cap": Key("final_logit_softcapping", "final_logit_softcapping"),
}
_GEMMA_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _gemma_scale(largest_layers: int, fields: Fields) -> float:
    """Return llama.cpp's scale of scores: only the largest model, known by its layers, has another size than its heads."""
    is_largest = fields["num_layers"] == largest_layers
    return (fields["hidden_size"] / fields["num_heads"] if is_largest else fields["head_dim"]) ** -0.5


# Of families with one GGUF architecture, files are read as the first one.
FAMILIES: tuple[Family, ...] = (
    Family(names=Names("Llama", "LlamaForCausalLM", "llama", "llama"), gguf_permuted=True, keys=_BIASES),
    Family(names=Names("Mistral", "MistralForCausalLM", "mistral", "mistral3"), **_MISTRAL),  # older files say llama
    Family(names=Names("Ministral", "MinistralForCausalLM", "ministral", "llama"), **_MISTRAL),
    Family(names=Names("Ministral 3", "Ministral3ForCausalLM", "ministral3", "mistral3"), uniform=True, **_MINISTRAL_3),
    Family(
        names=Names("Qwen2", "Qwen2ForCausalLM", "qwen2", "qwen2"),
        fixed={"qkv_bias": True},
        defaults={"max_position_embeddings": 32768},
    ),
    Family(
        names=Names("Qwen3", "Qwen3ForCausalLM", "qwen3", "qwen3"),
        keys=_ATTENTION_BIAS,
        fixed={"qk_norm": "heads"},
        defaults={"head_dim": 128, "max_position_embeddings": 32768},
    ),
    Family(
        names=Names("SmolLM3", "SmolLM3ForCausalLM", "smollm3", "smollm3"),
        gguf_permuted=True,
        keys=_BIASES,
        defaults={"rope_theta": 2000000.0, "tie_word_embeddings": True, "max_position_embeddings": 32768},
        nope_every=4,
    ),
    Family(
        names=Names("Granite", "GraniteForCausalLM", "granite", "granite"),
        gguf_permuted=True,
        keys={**_BIASES, **_GRANITE},
        defaults=_GRANITE_DEFAULTS,
    ),
    Family(
        names=Names("Granite 4", "GraniteMoeHybridForCausalLM", "granitemoehybrid", "granite"),
        gguf_permuted=True,
        keys={**_ATTENTION_BIAS, **_GRANITE},
        defaults={**_GRANITE_DEFAULTS, "layer_types": ["linear_attention"]},
        mlp_size="shared_intermediate_size",
        required={
            "num_local_experts": (0, "a mixture of experts"),
            "position_embedding_type": ("rope", "attention without rotary embedding"),
        },
        written={"mamba_n_heads": 1},
        stacked={
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_mlp.output_linear": ("mlp.down_proj",),
        },
    ),
    Family(
        names=Names("Phi-3", "Phi3ForCausalLM", "phi3", "phi3"),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
        full_every=1,
        uniform=True,
        partial_rotary=True,
        stacked={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        },
    ),
    Family(
        names=Names("OLMo 2", "Olmo2ForCausalLM", "olmo2", "olmo2"),
        keys=_ATTENTION_BIAS,
        fixed=_OLMO,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        names=Names("OLMo 3", "Olmo3ForCausalLM", "olmo3", "olmo2"),
        # Frequencies are stretched in layers without a window only.
        keys={**_ATTENTION_BIAS, "local_rope_theta": Key(None)},
        fixed=_OLMO,
        gguf_fixed={"local_rope_theta": lambda fields: fields["rope_theta"]},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
        full_every=4,
    ),
    Family(
        names=Names("Gemma 2", "Gemma2ForCausalLM", "gemma2", "gemma2"),
        keys={**_GEMMA_KEYS, "score_cap": Key("attn_logit_softcapping", "attn_logit_softcapping")},
        fixed=_GEMMA,
        gguf_fixed={"score_scale": partial(_gemma_scale, 46)},
        defaults={**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        full_every=2,
    ),
    Family(
        names=Names("Gemma 3", "Gemma3ForCausalLM", "gemma3_text", "gemma3"),
        keys={**_GEMMA_KEYS, "local_rope_theta": Key("rope_local_base_freq", "rope.freq_base_swa")},
        fixed={**_GEMMA, "qk_norm": "heads"},
        gguf_fixed={"score_scale": partial(_gemma_scale, 62)},
        defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "max_position_embeddings": 131072},
        full_every=6,
    ),
)
SUPPORTED = ", ".join(family.names.name for family in FAMILIES)


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.names.name == name)


# Words in the name of an architecture, and keys of its configuration, that show a feature without support.
_FEATURES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("an encoder", ("Bert", "bert", "T5", "t5", "Encoder", "Bart"), ("is_encoder_decoder",)),
    ("images or sound", ("Conditional", "Vision", "VL", "vl", "Audio", "clip"), ("vision_config", "audio_config")),
    (
        "a mixture of experts",
        ("Moe", "MoE", "moe", "Mixtral", "mixtral", "Jamba"),
        ("num_experts", "num_local_experts", "n_routed_experts", "expert_count"),
    ),
    ("recurrent layers", ("amba", "linear", "ybrid", "wkv", "fm2", "Qwen3_5"), ("mamba_d_state", "ssm.state_size")),
)


def unsupported_feature(architecture: str, has: Callable[[str], bool]) -> str:
    """Return the feature of a model that is not supported, such as `` with a mixture of experts``; empty if unknown.

    ``has``: True for a key of its configuration with a value other than zero.
    """
    for feature, words, keys in _FEATURES:
        if any(word in architecture for word in words) or any(has(key) for key in keys):
            return f" with {feature}"
    return ""
