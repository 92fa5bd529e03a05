"""Reads a ``LlamaConfig`` from a GGUF's metadata."""

import math
from typing import Any

import torch

from tightwire.model.checkpoint.config import LlamaConfig, RopeScaling
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf import GgufFile

_DTYPES = {"F32": "float32", "F16": "float16"}  # other types are served as bfloat16
# End-of-turn tokens of known chat formats. Older files list only the end-of-document token.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end_of_text|>")
_ROPE_FREQS = "rope_freqs.weight"


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """Read sizes, rope and token ids; raises ModelError for anything that is missing or not supported."""
    try:
        return _config_from_gguf(file)
    except ModelError:
        raise
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise ModelError(f"{file.path}: its metadata is damaged: {error}") from None


def _config_from_gguf(file: GgufFile) -> LlamaConfig:
    arch = file.get("general.architecture")
    if arch != "llama":
        raise ModelError(f"{file.path}: architecture {arch!r} is not supported; supported: llama")
    if int(file.get("llama.expert_count", 0)):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported; supported: dense llama")
    heads, hidden = _size(file, "attention.head_count"), _size(file, "embedding_length")
    embedding, query = (file.tensors.get(name) for name in ("token_embd.weight", "blk.0.attn_q.weight"))
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    head_dim = _size(file, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _size(file, key, head_dim) != head_dim:
            raise ModelError(f"{file.path}: llama.{key}={file.get('llama.' + key)} differs from head size {head_dim}")
    return LlamaConfig(
        num_layers=_size(file, "block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_size(file, "attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_size=_size(file, "feed_forward_length"),
        vocab_size=embedding.shape[0],  # some files' own count omits the padding
        max_positions=_size(file, "context_length"),
        norm_eps=_shortest_float(file.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        rope_theta=float(file.get("llama.rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(file, head_dim),
        tied_embeddings="output.weight" not in file.tensors,
        attention_bias=_has_bias(file, "attn_q", "attn_k", "attn_v", "attn_output"),
        mlp_bias=_has_bias(file, "ffn_gate", "ffn_up", "ffn_down"),
        dtype=_DTYPES.get(query.kind.name if query else "", "bfloat16"),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(file),
    )


def _size(file: GgufFile, key: str, default: int | None = None) -> int:
    value: Any = file.get(f"llama.{key}", default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{file.path}: llama.{key} differs between layers, which is not supported: {value}")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{file.path}: llama.{key} is {'missing' if value is None else f'{value!r}'}")
    return value


def _shortest_float(value: float) -> float:
    """Return the shortest decimal that rounds to this float32, such as 1e-5 for 9.999999747378752e-06."""
    return float(f"{value:.6g}")


def _has_bias(file: GgufFile, *names: str) -> bool:
    present = [name for name in names if f"blk.0.{name}.bias" in file.tensors]
    if present and len(present) != len(names):
        raise ModelError(f"{file.path}: only {', '.join(present)} have a bias; supported: all of {', '.join(names)}")
    return bool(present)


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = file.get("tokenizer.ggml.tokens", [])
    ids += [tokens.index(token) for token in _END_OF_TURN if token in tokens]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _rope_scaling(file: GgufFile, head_dim: int) -> RopeScaling:
    """Read scaling from the keys, or from the frequency divisors that llama.cpp stores for Llama 3.1 and later."""
    kind = file.get("llama.rope.scaling.type")
    factor = float(file.get("llama.rope.scaling.factor", 0) or file.get("llama.rope.scale_linear", 0) or 1)
    if kind not in (None, "none", "linear"):
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported; supported: none, linear, llama3")
    if _ROPE_FREQS in file.tensors:
        if factor != 1.0:
            raise ModelError(f"{file.path}: {_ROPE_FREQS} together with a scaling factor of {factor} is not supported")
        return _llama3_scaling(file, head_dim)
    if kind == "none" or factor == 1.0:
        return RopeScaling()
    return RopeScaling(kind="linear", factor=factor)


def _llama3_scaling(file: GgufFile, head_dim: int) -> RopeScaling:
    """Recover Llama 3's scaling: the largest divisor is the factor, the others must match the released values."""
    tensor = file.tensors[_ROPE_FREQS]
    if tensor.kind.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{file.path}: {_ROPE_FREQS} has an unexpected type or shape {tensor.shape}")
    divisors = file.file.numbers(tensor.offset, tensor.shape, torch.float32).tolist()
    if all(divisor == 1.0 for divisor in divisors):
        return RopeScaling()
    theta = float(file.get("llama.rope.freq_base", 10000.0))
    scaling = RopeScaling(kind="llama3", factor=_shortest_float(max(divisors)))
    want = [llama3_divisor(scaling, 2 * math.pi * theta ** (2 * i / head_dim)) for i in range(head_dim // 2)]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, want, strict=True)):
        raise ModelError(
            f"{file.path}: the rope divisors in {_ROPE_FREQS} are not those of Llama 3 "
            f"(low_freq_factor {scaling.low_freq_factor}, high_freq_factor {scaling.high_freq_factor}, trained context "
            f"{scaling.original_max_positions}); other long-context scalings are not supported"
        )
    return scaling


def llama3_divisor(scaling: RopeScaling, wavelength: float) -> float:
    """The divisor that Llama 3's scaling applies to the frequency with this wavelength, in positions."""
    turns = scaling.original_max_positions / wavelength
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = min(max(share, 0.0), 1.0)
    return 1 / ((1 - kept_share) / scaling.factor + kept_share)
