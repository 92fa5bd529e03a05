"""``LlamaConfig``: the description of one model, its sizes and what its layers compute."""

import math
from dataclasses import dataclass, field

from tightwire.model.families import Family, family_named

_CHOICES = {
    "qk_norm": ("none", "heads", "projection"),
    "norms": ("before", "after", "both"),
    "activation": ("silu", "gelu_tanh"),
}
_POSITIVE = ("rope_theta", "logits_divisor", "embedding_scale", "residual_scale")
_POSITIVE_OR_OFF = ("norm_eps", "score_scale", "score_cap", "logits_cap", "local_rope_theta")
ROPE_KINDS = ("none", "linear", "llama3", "dynamic", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Scaling of rotary frequencies.

    ``linear`` divides all by ``factor``, ``llama3`` those of long wavelengths (2407.21783), ``yarn`` those that turn
    too rarely (2309.00071), ``longrope`` each by its own factor (2402.13753). ``dynamic`` changes nothing up to the
    model's context, and longer ones are not served.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's bounds are whole numbers
    attention_factor: float = 1.0  # multiplies cosines and sines
    short_factors: tuple[float, ...] = ()  # longrope's, for contexts up to the original one
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one model, before any split over ranks, and what its layers compute; by default Llama's."""

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
    qkv_bias: bool = False
    output_bias: bool = False  # on attention's output projection
    mlp_bias: bool = False  # on gate, up and down
    dtype: str = "bfloat16"  # of the checkpoint
    packed_file: bool = field(default=False, compare=False, repr=False)  # it has blocks, and no dtype of its own
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    family: str = "Llama"  # an entry of ``families``, for names in files and messages
    qk_norm: str = "none"  # RMS norm of q and k: over each of the ``heads``, or over all of the ``projection``
    norms: str = "before"  # RMS norm of attention's and the MLP's input, ``after``: of their result, ``both``: of each
    norm_offset: float = 0.0  # added to the norms' weights
    activation: str = "silu"  # of the gate; or gelu_tanh
    score_scale: float = 0.0  # of attention's scores; 0: head_dim ** -0.5
    score_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they do not
    logits_cap: float = 0.0  # the same for logits
    logits_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of each result that is added to the residual
    rotary_dim: int = 0  # numbers of a head that are rotated, the first ones; 0: all
    local_rope_theta: float | None = None  # layers with a window rotate by this base, unscaled; None: as the others
    window: int = 0  # tokens that a row attends to, itself included, in the layers of ``sliding``
    sliding: tuple[int, ...] = ()
    nope: tuple[int, ...] = ()  # layers without rotary embedding
    first_layer: int = 0  # of a stage alone (``layout.stage_model``): the number of its first layer in the checkpoint
    has_head: bool = True  # False: of a stage before the last

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")
        rope, num_pairs = self.rope_scaling, (self.rotary_dim or self.head_dim) // 2
        num_factors = num_pairs if rope.kind == "longrope" else 0
        for factors in (rope.short_factors, rope.long_factors):
            if len(factors) != num_factors:
                raise ValueError(f"rope scaling has {len(factors)} factors, and heads rotate {num_pairs} pairs")
        factor = math.prod((rope.factor, rope.attention_factor, *rope.short_factors, *rope.long_factors))
        given = {name: getattr(self, name) for name in _POSITIVE} | {"a factor of rope scaling": factor}
        given |= {name: getattr(self, name) or 1.0 for name in _POSITIVE_OR_OFF}
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {value}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def layer_matrix_elems(self) -> int:
        """Number of elements in the matrices of one layer."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.hidden_size * (attention + 3 * self.mlp_size)

    @property
    def entry(self) -> Family:
        return family_named(self.family)

    @property
    def scale(self) -> float:
        """The factor of attention's scores."""
        return self.score_scale or self.head_dim**-0.5

    def window_of(self, layer: int) -> int:
        """Return the layer's window; 0: a row attends to all tokens before it."""
        return self.window if layer in self.sliding else 0


def check_ranks(num_heads: int, num_ranks: int, flag: str = "--tp") -> None:
    """Raise ValueError if there are more ranks than query heads."""
    if num_ranks > num_heads:
        raise ValueError(f"cannot split {num_heads} query heads over {num_ranks} ranks; use {flag} {num_heads} or less")


def check_context(max_positions: int, longest: int) -> None:
    """Raise ValueError if the ``longest`` sequence exceeds the model's context."""
    if longest > max_positions:
        raise ValueError(
            f"--max-model-len {longest} exceeds the model's context of {max_positions} tokens; use at most {max_positions}"
        )
