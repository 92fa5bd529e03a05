"""Reads the metadata of a .gguf as ``LlamaConfig``; of the rotary embedding also its tensors of factors."""

from typing import Any

import torch

from tightwire.kernels.spec import rope
from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.model.checkpoint.gguf import GgufFile
from tightwire.model.checkpoint.hf_rope import longrope_attention, yarn_attention
from tightwire.model.families import FAMILIES, SUPPORTED, Family, unsupported_feature

_DIVISORS = "rope_freqs.weight"  # of Llama 3.1 and later
_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")  # of longrope
_BIASES = {"qkv_bias": "attn_q", "output_bias": "attn_q", "mlp_bias": "ffn_down"}  # found by one of each
_DTYPES = {"F32": "float32", "F16": "float16"}  # other types are served as bfloat16
# Tokens that end an answer in any family. A file lists one or some of its own.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>")


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """Read sizes, rope and token ids; raises ModelError for anything that is missing or not supported."""
    with naming(file.path, "its metadata is damaged", TypeError, ValueError, AttributeError, IndexError, OverflowError):
        return _config_from_gguf(file)


def _config_from_gguf(file: GgufFile) -> LlamaConfig:
    family = _family(file)
    heads, hidden = file.size("attention.head_count"), file.size("embedding_length")
    embedding = file.tensors.get("token_embd.weight")
    query = file.tensors.get("blk.0.attn_q.weight") or file.tensors.get("blk.0.attn_qkv.weight")
    if embedding is None:
        raise ModelError("tensor token_embd.weight is missing")
    fields: dict[str, Any] = {
        "family": family.names.name,
        "num_layers": file.size("block_count", most=len(file.tensors)),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": file.size("attention.head_count_kv", heads),
        "head_dim": (head_dim := file.size("attention.key_length", hidden // heads)),
        "mlp_size": file.size("feed_forward_length"),
        "vocab_size": embedding.shape[0],  # some files' own count omits the padding
        "max_positions": file.size("context_length"),
        "norm_eps": shortest_float(file.own("attention.layer_norm_rms_epsilon", 1e-5)),
        "tied_embeddings": "output.weight" not in file.tensors,
        **{name: f"blk.0.{of}.bias" in file.tensors for name, of in _BIASES.items() if name in family.keys},
    }
    if file.size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.arch}.attention.value_length differs from head size {head_dim}")
    for name, key in family.keys.items():
        if key.gguf is not None and (value := file.own(key.gguf, family.defaults.get(key.hf or ""))):
            fields[name] = shortest_float(value) ** key.power
    if file.own("attention.temperature_scale"):  # temperatures of attention are 1 in the original context
        fields["max_positions"] = min(fields["max_positions"], file.size("rope.scaling.original_context_length"))
    fields |= _windows(file, family, fields["num_layers"]) | _rope(file, family, head_dim)
    fields |= {name: value(fields) for name, value in family.gguf_fixed.items() if name not in fields}
    fields |= {name: value(fields) if callable(value) else value for name, value in family.fixed.items()}
    ids = _token_ids(file, fields["vocab_size"], "eos_token_id", "eot_token_id", "eom_token_id")
    tokens = file.get("tokenizer.ggml.tokens", [])
    ids += [tokens.index(token) for token in _ENDS if token in tokens]
    return LlamaConfig(
        **fields,
        dtype=_DTYPES.get(query.kind.name if query else "", "bfloat16"),
        packed_file=query is not None and query.kind.name not in (*_DTYPES, "BF16"),
        bos_token_id=next(iter(_token_ids(file, fields["vocab_size"], "bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(ids)),
    )


def _family(file: GgufFile) -> Family:
    """Return the entry of the table. ModelError: there is none, with the feature that is missing."""
    arch = file.arch
    families = [family for family in FAMILIES if family.names.gguf == arch]
    # Files of a dense Granite 4 keep the sizes of recurrent layers, of which they have none.
    feature = unsupported_feature(arch, lambda key: bool(file.own(key)) and not (families and key.startswith("ssm.")))
    if feature or not families:
        raise ModelError(f"architecture {arch!r:.60}{feature} is not supported; supported families: {SUPPORTED}")
    # OLMo 3 has OLMo 2's architecture, and a window.
    with_window = [family for family in families if family.full_every > 1]
    return with_window[0] if with_window and file.own("attention.sliding_window") else families[0]


def _windows(file: GgufFile, family: Family, num_layers: int) -> dict[str, Any]:
    """Return the layers with a window, as the file or else the family says, and those without rotary embedding."""
    layers, nope_every = range(num_layers), family.nope_every
    found: dict[str, Any] = {"nope": tuple(layer for layer in layers if nope_every and (layer + 1) % nope_every == 0)}
    usual = family.defaults["sliding_window"] if family.full_every > 1 else 0  # Gemma 2's first files have none
    if family.full_every and (window := file.own("attention.sliding_window", usual)):
        every = file.own("attention.sliding_window_pattern", 0 if family.full_every == 1 else family.full_every)
        flags = every if isinstance(every, list) else [not every or (layer + 1) % every for layer in layers]
        found |= {"window": int(window), "sliding": tuple(layer for layer in layers if flags[layer])}
    return found


def _token_ids(file: GgufFile, vocab_size: int, *names: str) -> list[int]:
    found = {f"tokenizer.ggml.{name}": file.get(f"tokenizer.ggml.{name}") for name in names}
    for key, value in found.items():
        if value is not None and not (isinstance(value, int) and 0 <= value < vocab_size):
            raise ModelError(f"{key} must be a token below {vocab_size}, got {value!r}")
    return [value for value in found.values() if value is not None]


def shortest_float(value: float) -> float:
    """Return the shortest decimal that rounds to this float32, such as 1e-5 for 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _rope(file: GgufFile, family: Family, head_dim: int) -> dict[str, Any]:
    """Return theta, scaling and width; raises ModelError for anything that is not supported."""
    rotary_dim = file.size("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not (family.partial_rotary and rotary_dim < head_dim and rotary_dim % 2 == 0):
        raise ModelError(f"{file.arch}.rope.dimension_count={rotary_dim} differs from head size {head_dim}")
    theta = shortest_float(float(file.own("rope.freq_base", 10000.0)))
    scaling = _scaling(file, rotary_dim, theta)
    return {"rope_theta": theta, "rope_scaling": scaling, "rotary_dim": rotary_dim if rotary_dim < head_dim else 0}


def _scaling(file: GgufFile, rotary_dim: int, theta: float) -> RopeScaling:
    """Read scaling from the keys, or from the divisors or factors that llama.cpp stores as tensors."""
    kind = file.own("rope.scaling.type")
    factor = shortest_float(float(file.own("rope.scaling.factor", 0) or file.own("rope.scale_linear", 0) or 1))
    if kind not in (None, "none", "linear", "yarn", "longrope"):
        raise ModelError(f"rope scaling {kind!r} is not supported; supported: none, linear, llama3, yarn, longrope")
    if _DIVISORS in file.tensors:
        if factor != 1.0:
            raise ModelError(f"{_DIVISORS} together with a scaling factor of {factor} is not supported")
        return _llama3(file, rotary_dim, theta)
    if any(name in file.tensors for name in _FACTORS):
        return _longrope(file, rotary_dim)
    if kind == "yarn":
        of_all = float(file.own("rope.scaling.yarn_log_multiplier") or 0)
        given = file.own("rope.scaling.attn_factor")  # OLMo's is the whole factor, others' multiplies the usual one
        usual = 1.0 if given and file.arch == "olmo2" else yarn_attention(factor) / yarn_attention(factor, of_all)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=file.size("rope.scaling.original_context_length"),
            attention_factor=usual * float(given or 1.0),
            beta_fast=float(file.own("rope.scaling.yarn_beta_fast") or 32),
            beta_slow=float(file.own("rope.scaling.yarn_beta_slow") or 1),
        )
    length = file.size("context_length")
    is_unsaid = kind == "longrope" or (kind, factor, file.own("attention.temperature_scale")) == (None, 1.0, None)
    if is_unsaid and (original := file.own("rope.scaling.original_context_length", length)) < length:
        raise ModelError(f"{_FACTORS[0]} is missing: how {original} positions became {length}; convert the model again")
    return RopeScaling(kind="linear", factor=factor) if kind in (None, "linear") and factor != 1.0 else RopeScaling()


def _numbers(file: GgufFile, name: str, rotary_dim: int) -> list[float]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32" or tensor.shape != (rotary_dim // 2,):
        raise ModelError(f"{name} is missing, or has an unexpected type or shape: {tensor and tensor.shape}")
    return tensor.file.numbers(tensor.offset, tensor.shape, torch.float32).tolist()


def _longrope(file: GgufFile, rotary_dim: int) -> RopeScaling:
    factor = file.size("context_length") / (original := file.size("rope.scaling.original_context_length"))
    short, long = (tuple(map(shortest_float, _numbers(file, name, rotary_dim))) for name in _FACTORS)
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=float(file.own("rope.scaling.attn_factor") or longrope_attention(factor, original)),
        short_factors=short,
        long_factors=long,
    )


def _llama3(file: GgufFile, rotary_dim: int, theta: float) -> RopeScaling:
    """Recover Llama 3's scaling: the largest divisor is the factor, the others must match the released values."""
    divisors = _numbers(file, _DIVISORS, rotary_dim)
    if all(divisor == 1.0 for divisor in divisors):
        return RopeScaling()
    scaling = RopeScaling(kind="llama3", factor=shortest_float(max(divisors)))
    wavelengths = theta ** (torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    bounds = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    want = 1 / (wavelengths * rope.llama3(wavelengths, scaling.factor, *bounds))
    if not torch.allclose(torch.tensor(divisors).double(), want, rtol=1e-4, atol=0):
        supported = f"trained context, low_freq_factor and high_freq_factor {bounds}"
        raise ModelError(f"the rope divisors in {_DIVISORS} are not those of Llama 3; supported: {supported}")
    return scaling
