"""Reads a Hugging Face config.json as ``LlamaConfig``, and writes one."""

from collections.abc import Mapping
from typing import Any

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.model.checkpoint.hf_rope import FULL, SLIDING, rope_from_hf, rope_to_hf
from tightwire.model.checkpoint.quantization import parse_quantization
from tightwire.model.families import FAMILIES, SUPPORTED, Family, unsupported_feature

_MOST_LAYERS = 1000
_DTYPES = ("float32", "bfloat16", "float16")
# Names in a config.json of sizes, which are checked.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@naming("config.json", "a value has a wrong type or is invalid", TypeError, ValueError, AttributeError, ArithmeticError)
def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Read a config.json, and the generation_config.json beside it if there is one.

    Missing keys get transformers' defaults. End tokens of both files apply, generation's first, because instruct models
    often list the end-of-turn token only there. Raises ModelError: unsupported family, rope kind, activation or
    quantization, or a missing or invalid size.
    """
    family = _family(config)
    config, generation = {**family.defaults, **config}, generation or {}
    _refuse_unsupported(config, family)
    fields: dict[str, Any] = {**_sizes(config, family), "family": family.names.name}
    fields["norm_eps"] = float(config.get("rms_norm_eps", 1e-6))
    fields["tied_embeddings"] = bool(config.get("tie_word_embeddings", False))
    for name, key in family.keys.items():
        value = config.get(key.hf or "")
        if value is not None:
            fields[name] = value if isinstance(value, bool) else float(value) ** key.power
    fields |= _windows(config, family, fields) | rope_from_hf(config, family, fields)
    fields |= {name: value(fields) if callable(value) else value for name, value in family.fixed.items()}
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return LlamaConfig(
        **fields,
        dtype=dtype,
        bos_token_id=next(iter(_ids("bos_token_id", fields, config)), None),
        eos_token_ids=_ids("eos_token_id", fields, generation, config),
    )


def _family(config: Mapping[str, Any]) -> Family:
    """Return the entry of the table. ModelError: there is none, with the feature that is missing."""
    architectures, model_type = config.get("architectures") or [], config.get("model_type")
    named = [family for family in FAMILIES if family.names.architecture in architectures]
    typed = [family for family in FAMILIES if family.names.model_type == model_type]
    if named and typed and named != typed:
        raise ModelError(f"architectures {architectures} and model_type {model_type!r} are two families; correct one")
    if named or (typed and not architectures):
        return (named or typed)[0]
    found = ", ".join(map(str, architectures)) or f"model_type {model_type!r}"
    feature = unsupported_feature(found, lambda key: bool(config.get(key)))
    raise ModelError(f"{found!s:.60}{feature} is not supported; supported families: {SUPPORTED}")


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    parse_quantization(config)
    wanted = family.fixed.get("activation", "silu")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if _ACTIVATIONS.get(activation) != wanted:
        supported = next(name for name, own in _ACTIVATIONS.items() if own == wanted)
        raise ModelError(f"activation {activation!r} is not supported; supported: {supported}")
    for key, supported in (("use_sliding_window", False), ("use_bidirectional_attention", False), ("is_causal", True)):
        if (value := config.get(key)) is not None and bool(value) != supported:
            raise ModelError(f"{key} {value!r:.60} is not supported; supported: {str(supported).lower()}")
    for key, (value, feature) in family.required.items():
        if config.get(key) != value:
            raise ModelError(f"{family.names.name} with {feature} is not supported; supported: {key} {value!r}")
    types = config.get("layer_types") or family.defaults.get("layer_types")
    known = (FULL, SLIDING) if family.full_every else (FULL,)
    for kind in types if isinstance(types, list) else ():
        if kind not in (*known, "attention"):  # the last one of Granite 4
            feature = unsupported_feature(str(kind), lambda key: False) or f" with {kind!r:.60} in layer_types"
            raise ModelError(f"{family.names.name}{feature} is not supported; supported: {', '.join(known)}")


def _sizes(config: Mapping[str, Any], family: Family) -> dict[str, int]:
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    defaults = {"num_kv_heads": heads, "head_dim": hidden // heads, "max_positions": 2048}
    keys = _SIZES | {"mlp_size": family.mlp_size}
    sizes = {name: _size(config, key, defaults.get(name)) for name, key in keys.items()}
    if sizes["num_layers"] > _MOST_LAYERS:
        raise ModelError(f"num_hidden_layers is {sizes['num_layers']}; possible: 1 to {_MOST_LAYERS}")
    return sizes


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    if (value := config.get(key)) is None and (value := default) is None:
        raise ModelError(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} must be a whole number above 0, got {value!r}")
    return value


def _windows(config: Mapping[str, Any], family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers with a window, and those without rotary embedding."""
    layers = range(fields["num_layers"])
    for key in ("layer_types", "no_rope_layers"):
        if (own := config.get(key)) is not None and (not isinstance(own, list) or len(own) != len(layers)):
            raise ModelError(f"{key} must be a list of {len(layers)} entries, one for each layer, got {own!r:.80}")
    flags = config.get("no_rope_layers")  # despite its name 1 stands for a layer with rotary embedding
    if flags is None and family.nope_every:
        every = config.get("no_rope_layer_interval") or family.nope_every
        flags = [(layer + 1) % every for layer in layers]
    found: dict[str, Any] = {}
    if family.nope_every and flags is not None:
        found["nope"] = tuple(layer for layer in layers if not flags[layer])
    if family.full_every and config.get("sliding_window"):
        every = (family.full_every > 1 and config.get("sliding_window_pattern")) or family.full_every
        by_pattern = [FULL if every > 1 and (layer + 1) % every == 0 else SLIDING for layer in layers]
        types = (not family.uniform and config.get("layer_types")) or by_pattern
        window, sliding = _size(config, "sliding_window"), tuple(layer for layer in layers if types[layer] == SLIDING)
        found |= {"window": window, "sliding": sliding} if sliding else {}
    return found


def _ids(key: str, fields: Mapping[str, Any], *files: Mapping[str, Any]) -> tuple[int, ...]:
    """Return all ids in order, without duplicates."""
    values = (file.get(key) for file in files)
    ids = [token_id for value in values for token_id in ([value] if isinstance(value, int) else value or ())]
    if not all(isinstance(token_id, int) and 0 <= token_id < fields["vocab_size"] for token_id in ids):
        found = f"got {ids}{' with those of its generation file' if len(files) > 1 else ''}"
        raise ModelError(f"{key} must be a token id below {fields['vocab_size']} or a list of them, {found}")
    return tuple(dict.fromkeys(ids))


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the object of a config.json. ``config_from_hf`` reads it back unchanged, and transformers accepts it."""
    family = config.entry
    activation = next(name for name, own in _ACTIVATIONS.items() if own == config.activation)
    exported: dict[str, Any] = {"architectures": [family.names.architecture], "model_type": family.names.model_type}
    exported |= {"hidden_act": activation, "hidden_activation": activation}
    exported |= {key: value for key, (value, _) in family.required.items()} | dict(family.written)
    exported |= {key: getattr(config, name) for name, key in (*_SIZES.items(), ("mlp_size", family.mlp_size))}
    exported |= {"rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied_embeddings}
    exported |= {"torch_dtype": config.dtype, "bos_token_id": config.bos_token_id, "pad_token_id": None}
    for name, key in family.keys.items():
        value = config.scale if name == "score_scale" else getattr(config, name)
        if key.power != 1.0:
            value = round(value ** (1 / key.power))
        if key.hf is not None:
            exported[key.hf] = value or (None if isinstance(value, float) else value)
    layers = range(config.num_layers)
    if family.full_every or "layer_types" in family.defaults:
        exported["sliding_window"] = config.window or None
        exported["layer_types"] = [SLIDING if layer in config.sliding else FULL for layer in layers]
    if family.nope_every:
        exported["no_rope_layers"] = [int(layer not in config.nope) for layer in layers]
    exported |= rope_to_hf(config)
    if config.eos_token_ids:
        exported["eos_token_id"] = list(config.eos_token_ids)
    return exported
