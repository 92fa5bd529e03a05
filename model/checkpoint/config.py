"""``LlamaConfig``: a Llama's sizes and constants, read from and written to a Hugging Face config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.quantization import parse_quantization


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies: ``none``, ``linear`` (by ``factor``) or ``llama3`` (by wavelength: 2407.21783)."""

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("none", "linear", "llama3"):
            raise ValueError(f"unsupported rope scaling {self.kind!r}; choose one of none, linear, llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one model, before any split over ranks."""

    num_layers: int
    hidden_size: int  # D
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # E
    mlp_size: int  # F
    vocab_size: int  # V
    max_positions: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tied_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v and o
    mlp_bias: bool = False  # on gate, up and down
    dtype: str = "bfloat16"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "grouped-query attention needs equal groups"
            )

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layer_matrix_elems(self) -> int:
        """Number of elements in the matrices of one layer."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.hidden_size * (attention + 3 * self.mlp_size)


_ARCHITECTURE = "LlamaForCausalLM"
_DTYPES = ("float32", "bfloat16", "float16")
# Names in a config.json of fields that are copied: sizes, which are checked, and others.
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
_FLAGS = {"tied_embeddings": "tie_word_embeddings", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_OTHERS = {
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "dtype": "torch_dtype",
    "bos_token_id": "bos_token_id",
}


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Read a config.json, and the generation_config.json beside it if there is one.

    Missing keys get transformers' defaults. End tokens of both files apply, generation's first, because instruct models
    often list the end-of-turn token only there. Raises ModelError: unsupported architecture, rope kind, activation or
    quantization, or a missing or invalid size.
    """
    try:
        return _config_from_hf(config, generation or {})
    except ModelError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelError(f"config.json: a value has the wrong type or is invalid: {error}") from None


def _config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any]) -> LlamaConfig:
    _refuse_unsupported(config)
    heads, hidden = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    defaults = {"num_kv_heads": heads, "head_dim": hidden // heads, "max_positions": 2048}
    sizes = {name: _size(config, key, defaults.get(name)) for name, key in _SIZES.items()}
    if sizes["head_dim"] % 2:
        raise ModelError(f"config.json: head_dim={sizes['head_dim']} is odd; rotary embeddings rotate pairs")
    theta, scaling = _rope_from_hf(config)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPES:
        raise ModelError(f"config.json: dtype {dtype!r} is not supported; supported: {', '.join(_DTYPES)}")
    return LlamaConfig(
        **sizes,
        **{name: bool(config.get(key, False)) for name, key in _FLAGS.items()},
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        dtype=dtype,
        bos_token_id=next(iter(_ids("bos_token_id", config.get("bos_token_id"))), None),
        eos_token_ids=_ids("eos_token_id", generation.get("eos_token_id"), config.get("eos_token_id")),
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if not architectures and config.get("model_type") == "llama":
        architectures = [_ARCHITECTURE]
    if _ARCHITECTURE not in architectures:
        found = ", ".join(map(str, architectures)) or f"model_type {config.get('model_type')!r}"
        raise ModelError(f"config.json: architecture {found} is not supported; supported: {_ARCHITECTURE}")
    parse_quantization(config)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: activation {activation!r} is not supported; supported: silu")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a whole number above 0, got {value!r}")
    return value


def _rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Return theta and scaling, from ``rope_theta`` and ``rope_scaling`` or transformers 5's ``rope_parameters``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; supported: 1.0")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        if kind == "default":
            return theta, RopeScaling()
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=float(rope["factor"]))
        if kind == "llama3":
            trained = rope.get("original_max_position_embeddings") or _size(config, "max_position_embeddings", 2048)
            factors = {name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
            return theta, RopeScaling(kind="llama3", **factors, original_max_positions=int(trained))
    except KeyError as error:
        raise ModelError(f"config.json: rope scaling {kind!r} lacks {error.args[0]!r}") from None
    raise ModelError(f"config.json: rope scaling {kind!r} is not supported; supported: default, linear, llama3")


def _ids(key: str, *values: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return all ids in order, without duplicates."""
    ids: list[int] = []
    for value in values:
        ids += [value] if isinstance(value, int) else list(value or ())
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ModelError(f"config.json: {key} must be a token id or a list of them, got {ids}")
    return tuple(dict.fromkeys(ids))


def check_ranks(num_heads: int, num_ranks: int) -> None:
    """Raise ValueError if there are more ranks than query heads."""
    if num_ranks > num_heads:
        raise ValueError(f"cannot split {num_heads} query heads over {num_ranks} ranks; use --tp {num_heads} or less")


def check_context(max_positions: int, longest: int) -> None:
    """Raise ValueError if the ``longest`` sequence exceeds the model's context."""
    if longest > max_positions:
        raise ValueError(
            f"--max-model-len {longest} exceeds the model's context of {max_positions} tokens; use at most {max_positions}"
        )


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Return the object of a config.json. ``config_from_hf`` reads it back unchanged, and transformers accepts it."""
    exported: dict[str, Any] = {"architectures": [_ARCHITECTURE], "model_type": "llama", "hidden_act": "silu"}
    exported |= {key: getattr(config, name) for name, key in (_SIZES | _FLAGS | _OTHERS).items()}
    exported["rope_scaling"] = _rope_to_hf(config.rope_scaling)
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
