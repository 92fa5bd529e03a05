"""What shape of Llama this is: one frozen value, read from a Hugging Face config.json or from GGUF metadata."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``kind``: ``none``, ``linear`` (positions divided by ``factor``) or ``llama3`` (long wavelengths divided, short
    ones kept, a smooth ramp between; Llama 3.1 report).
    """

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
    dtype: str = "bfloat16"  # the checkpoint's own
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
