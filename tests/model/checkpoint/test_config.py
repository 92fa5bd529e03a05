"""config.json in all its spellings, read and written, and refused values."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from helpers.model.tiny_gguf import make_tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from tiny import VARIANTS, tiny_config
from transformers import AutoConfig
from transformers import LlamaConfig as HfConfig

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.header import RANDOM_SHAPES
from tightwire.model.checkpoint.hf_config import config_from_hf, config_to_hf
from tightwire.model.families import FAMILIES, Family
from tightwire.model.layout import make_layout
from tightwire.model.open import open_checkpoint
from tightwire.model.weights.formats import layer_tensors

LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_reads_what_transformers_reads(variant: str) -> None:
    raw = tiny_config(**VARIANTS[variant])
    ours, theirs = config_from_hf(raw), HfConfig(**raw)
    assert ours.head_dim == theirs.head_dim
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.mlp_size == theirs.intermediate_size
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert (ours.qkv_bias, ours.output_bias, ours.mlp_bias) == (*[theirs.attention_bias] * 2, theirs.mlp_bias)
    assert ours.rope_theta == (theirs.rope_parameters or {}).get("rope_theta")


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_reads_what_transformers_5_writes(variant: str) -> None:
    raw = tiny_config(**VARIANTS[variant])
    rewritten = HfConfig(**raw).to_dict()
    assert "rope_parameters" in rewritten
    assert config_from_hf(rewritten) == config_from_hf(raw)


def test_missing_keys_have_transformers_defaults() -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    raw = {key: tiny_config()[key] for key in (*sizes, "architectures")}
    ours, theirs = config_from_hf(raw), HfConfig(**raw)
    assert ours.num_kv_heads == theirs.num_key_value_heads == 4
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rope_theta == 10000.0
    assert not ours.tied_embeddings


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_old_and_new_spelling(key: str) -> None:
    scaling = config_from_hf(tiny_config(rope_scaling={key: "llama3", **LLAMA3_SCALING})).rope_scaling
    assert scaling == RopeScaling(kind="llama3", factor=32.0)
    assert config_from_hf(tiny_config(rope_scaling={key: "default"})).rope_scaling == RopeScaling()


def test_rope_parameters_carry_theta() -> None:
    raw = tiny_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    del raw["rope_theta"]
    config = config_from_hf(raw)
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(kind="linear", factor=2.0))


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


def test_rope_scaling_wins_over_rope_parameters_and_keeps_their_theta() -> None:
    """As the cards of Qwen say to add it, to a folder that transformers 5 saved."""
    raw = tiny_config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=_YARN)
    config = config_from_hf(raw)
    assert (config.rope_theta, config.rope_scaling.kind, config.rope_scaling.factor) == (1e6, "yarn", 4.0)
    assert config_from_hf({**raw, "rope_scaling": {**_YARN, "rope_theta": 1e6}}) == config
    assert config_from_hf({**raw, "rope_scaling": {**_YARN, "rope_theta": 5e5}}).rope_theta == 5e5
    assert config_from_hf({**raw, "rope_scaling": None}).rope_scaling == RopeScaling()


def test_rope_scaling_replaces_what_other_rope_parameters_say() -> None:
    earlier = {**_YARN, "factor": 2.0, "attention_factor": 3.0, "beta_fast": 16.0, "rope_theta": 1e6}
    alone = config_from_hf(tiny_config(rope_theta=1e6, rope_scaling=_YARN))
    assert config_from_hf(tiny_config(rope_parameters=earlier, rope_scaling=_YARN)) == alone


def test_the_top_level_original_context_wins() -> None:
    config = config_from_hf(tiny_config(rope_scaling=_YARN, original_max_position_embeddings=64))
    assert config.rope_scaling.original_max_positions == 64


@pytest.mark.parametrize("family", ["mistral", "ministral", "ministral3"])
def test_missing_keys_have_the_familys_own_defaults(family: str) -> None:
    left_out = ("architectures", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    raw = {key: value for key, value in tiny_config(model_type=family).items() if key not in left_out}
    ours, theirs = config_from_hf(raw), AutoConfig.for_model(**raw)
    assert (ours.window or None, ours.norm_eps) == (theirs.sliding_window, theirs.rms_norm_eps)
    assert ours.sliding == (tuple(range(ours.num_layers)) if ours.window else ())
    assert ours.head_dim == (theirs.head_dim or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    is_scaled = theirs.rope_parameters["rope_type"] == "yarn"
    assert ours.rope_scaling == (
        RopeScaling(kind="yarn", factor=16.0, original_max_positions=16384) if is_scaled else RopeScaling()
    )
    # Temperatures of attention, a default of Ministral 3, are 1 in the original context.
    assert ours.max_positions == (16384 if is_scaled else theirs.max_position_embeddings)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "olmo2", "phi3", "qwen3", "smollm3"])
def test_a_missing_context_has_the_familys_default(family: str) -> None:
    activation = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    raw = {**tiny_config(model_type=family, hidden_act=activation), "architectures": None}
    del raw["max_position_embeddings"]
    raw["rope_scaling"] = _LONGROPE if family == "phi3" else None
    ours, theirs = config_from_hf(raw), AutoConfig.for_model(**raw)
    assert ours.max_positions == theirs.max_position_embeddings
    if family == "phi3":  # not the inner one
        assert ours.rope_scaling.original_max_positions == theirs.rope_parameters["original_max_position_embeddings"]


def test_a_window_of_null_is_none() -> None:
    """As in Mistral-7B-v0.3."""
    assert config_from_hf(tiny_config(architectures=["MistralForCausalLM"], sliding_window=None)).window == 0


def test_gemma_3_has_no_cap_of_scores() -> None:
    """transformers ignores the key."""
    raw = tiny_config(architectures=["Gemma3ForCausalLM"], hidden_act="gelu_pytorch_tanh")
    raw |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    config = config_from_hf(raw)
    assert (config.score_cap, config.logits_cap) == (0.0, 3.0)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "want"),
    [
        (2, None, (2,)),
        ([1, 2], None, (1, 2)),
        (2, [9, 2], (9, 2)),
        (None, 9, (9,)),
        (128001, [128001, 128008, 128009], (128001, 128008, 128009)),
        (None, None, ()),
    ],
)
def test_end_tokens_of_both_files(in_config: Any, in_generation: Any, want: tuple[int, ...]) -> None:
    generation = None if in_generation is None else {"eos_token_id": in_generation}
    raw = tiny_config(eos_token_id=in_config, vocab_size=128256)
    assert config_from_hf(raw, generation).eos_token_ids == want
    with pytest.raises(ModelError, match=r"eos_token_id must be .*128256\] with those of its generation file"):
        config_from_hf({**raw, "eos_token_id": None}, {"eos_token_id": [1, 128256]})


_GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
_OLMO_3 = {"architectures": ["Olmo3ForCausalLM"]}
_GRANITE_4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "layer_types": ["attention"] * 2,
}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_under_both_names(key: str) -> None:
    raw = tiny_config()
    del raw["dtype"]
    assert config_from_hf({**raw, key: "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (
            {"architectures": ["GptOssForCausalLM"]},
            "GptOssForCausalLM is not supported; supported families: Llama, Mistral",
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM with a mixture of experts is not supported"),
        ({"architectures": ["XForCausalLM"], "num_experts": 8}, "XForCausalLM with a mixture of experts"),
        ({"architectures": ["GraniteMoeHybridForCausalLM"]}, "Granite 4 with a mixture of experts is not supported"),
        (_GRANITE_4 | {"num_local_experts": 8}, "Granite 4 with a mixture of experts is not supported"),
        (_GRANITE_4 | {"position_embedding_type": "nope"}, "Granite 4 with attention without rotary embedding"),
        (_GRANITE_4 | {"layer_types": ["mamba", "attention"]}, "Granite 4 with recurrent layers is not supported"),
        (_GRANITE_4 | {"layer_types": None}, "Granite 4 with recurrent layers is not supported"),
        (_GRANITE_4, "shared_intermediate_size is missing"),
        ({"layer_types": ["chunked_attention"] * 2}, "Llama with 'chunked_attention' in layer_types is not supported"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "with images or sound is not supported"),
        ({"architectures": ["FalconH1ForCausalLM"], "mamba_d_state": 16}, "with recurrent layers"),
        ({"architectures": ["Lfm2ForCausalLM"]}, "with recurrent layers"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "with an encoder"),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert' with an encoder"),
        ({"rope_scaling": {"rope_type": "xpos", "factor": 2.0}}, "'xpos' is not supported; supported: default, linear"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' lacks 'factor'"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window True is not supp"),
        ({"is_causal": False}, "is_causal False is not supported; supported: true"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.2}, "rotates 3 of a head's 16 numbers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks 'low_freq_factor'"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
            "rope scaling 'default' lacks 'original_max_position_embeddings'",
        ),
        (
            _GEMMA_3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope scaling 'linear' of sliding_attention is not supported; supported: default",
        ),
        (_OLMO_3 | {"rope_parameters": {"sliding_attention": _YARN}}, "'yarn' of sliding_attention is not supported"),
        (
            _GEMMA_3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 3e3}},
            "rope_parameters of Gemma 3 must have the keys full_attention and sliding_attention, got {'rope_type'",
        ),
        (
            {"rope_parameters": {"full_attention": _YARN}},
            "rope_parameters of Llama must have one theta and scaling for all layers",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"},
            "architectures ['LlamaForCausalLM'] and model_type 'mistral' are two families; correct one",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
            "SmolLM3 with 'sliding_attention' in layer_types is not supported; supported: full_attention",
        ),
        ({"hidden_act": "gelu"}, "'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number above 0, got 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
        ({"eos_token_id": [2, 304]}, "eos_token_id must be a token id below 304 or a list of them, got [2, 304]"),
        ({"bos_token_id": 304}, "bos_token_id must be a token id below 304"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention"]},
            "layer_types must be a list of 2 entries, one for each layer, got ['sliding_attention']",
        ),
        ({"architectures": ["Olmo3ForCausalLM"], "layer_types": "no"}, "layer_types must be a list of 2 entries"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 0]},
            "no_rope_layers must be a list of 2 entries, one for each layer, got [1, 1, 0]",
        ),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_divisor must be a number above 0"),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": float("nan")}, "residual_scale must be"),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -50.0}, "score_cap must be"),
        ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": -256}, "config.json"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7},
            },
            "rope scaling has 7 factors, and heads rotate 8 pairs",
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"rope_type": "longrope", "short_factor": [], "long_factor": []},
            },
            "rope scaling has 0 factors, and heads rotate 8 pairs",
        ),
        ({"rope_scaling": "linear"}, "wrong type"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_refused_by_name(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf(tiny_config(**overrides))
    assert named in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = [*tiny_config(), "rope_scaling", "rope_parameters", "quantization_config", "head_dim", "partial_rotary_factor"]
KEYS += ["layer_types", "sliding_window", "sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval"]


@given(data=st.data(), family=st.sampled_from(FAMILIES), value=JSON)
def test_any_value_is_accepted_or_refused_in_words(data: st.DataObject, family: Family, value: Any) -> None:
    key = data.draw(st.sampled_from([*KEYS, *(own.hf for own in family.keys.values() if own.hf)]))
    try:
        config_from_hf(tiny_config(**{"architectures": [family.names.architecture], key: value}))
    except ModelError as error:
        assert "config.json: " in str(error)


def test_counts_the_numbers_in_a_layers_matrices() -> None:
    config = config_from_hf(tiny_config())
    tensors = layer_tensors(config, make_layout(config, 1).shards[0], 0).values()
    assert config.layer_matrix_elems == sum(prod(each.shape) for each in tensors if each.columns is not None)


CONFIGS = {name: config_from_hf(tiny_config(**keys)) for name, keys in VARIANTS.items()} | RANDOM_SHAPES


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_config_round_trips(name: str) -> None:
    exported = json.loads(json.dumps(config_to_hf(CONFIGS[name])))
    assert config_from_hf(exported) == CONFIGS[name]


def test_a_ministral_3_without_scaling_round_trips() -> None:
    """A config.json that says nothing of it has the family's."""
    given = tiny_config(architectures=["Ministral3ForCausalLM"], rope_parameters={"rope_type": "default"})
    config = config_from_hf(given)
    assert config.rope_scaling.kind == "none"
    assert config_from_hf(config_to_hf(config)) == config


def test_end_tokens_keep_their_order() -> None:
    config = replace(CONFIGS["plain"], eos_token_ids=(9, 3, 5), bos_token_id=7, dtype="float16")
    assert config_from_hf(config_to_hf(config)) == config


def test_config_of_a_gguf_round_trips(tmp_path: Path) -> None:
    config = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", **VARIANTS["rope-linear"]))).config
    assert config.rope_scaling.kind == "linear"
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("name", ["plain", "rope-linear", "rope-llama3", "head-dim"])
def test_transformers_reads_the_same_sizes(tmp_path: Path, name: str) -> None:
    config: LlamaConfig = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (theirs.head_dim, theirs.num_key_value_heads) == (config.head_dim, config.num_kv_heads)
    assert config_from_hf(theirs.to_dict()) == config
