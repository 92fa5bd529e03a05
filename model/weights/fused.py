"""Which parts of the checkpoint's tensors a rank holds, and which of them lie together as one: names and ranges only.

Rows of several matrices that are multiplied with the same inputs lie below each other, so one product serves all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.names import EMBEDDING, FINAL_NORM, HEAD
from tightwire.model.layout import Shard


@dataclass(frozen=True, slots=True)
class Fused:
    """Rows of named tensors, one part below the other; of a matrix these columns, None: a vector."""

    parts: tuple[tuple[str, range], ...]
    columns: range | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows,) if self.columns is None else (self.num_rows, len(self.columns))


def outer_tensors(config: LlamaConfig, shard: Shard) -> dict[str, Fused]:
    """By the fields of ``OuterWeights``; no head where it is the embedding."""
    every = range(config.hidden_size)
    tensors = {
        "embedding": Fused(((EMBEDDING, shard.vocab_rows),), every),
        "final_norm": Fused(((FINAL_NORM, every),)),
    }
    if not config.tied_embeddings:
        tensors["head"] = Fused(((HEAD, shard.vocab_rows),), every)
    return tensors


def layer_tensors(config: LlamaConfig, shard: Shard, index: int) -> dict[str, Fused]:
    """By the fields of ``LayerWeights``; no biases that the model, or this rank, does not have."""
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    every = range(config.hidden_size)
    query, kv = _head_rows(shard.query_heads, config.head_dim), _head_rows(shard.kv_heads, config.head_dim)
    columns = shard.mlp_columns
    qkv = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    matrices = {
        "qkv": ({attention + name: rows for name, rows in qkv.items()}, every, config.attention_bias),
        "attention_out": ({attention + "o_proj": every}, query, config.attention_bias and shard.rank == 0),
        "gate_up": ({mlp + "gate_proj": columns, mlp + "up_proj": columns}, every, config.mlp_bias),
        "down": ({mlp + "down_proj": every}, columns, config.mlp_bias and shard.rank == 0),
    }
    tensors = {
        "attention_norm": Fused(((prefix + "input_layernorm.weight", every),)),
        "mlp_norm": Fused(((prefix + "post_attention_layernorm.weight", every),)),
    }
    for field, (parts, inputs, has_bias) in matrices.items():
        tensors[field] = Fused(tuple((name + ".weight", rows) for name, rows in parts.items()), inputs)
        if has_bias:
            tensors[field + "_bias"] = Fused(tuple((name + ".bias", rows) for name, rows in parts.items()))
    return tensors


def all_tensors(config: LlamaConfig, shard: Shard) -> Iterator[Fused]:
    """Everything that the rank with ``shard`` holds."""
    yield from outer_tensors(config, shard).values()
    for index in range(config.num_layers):
        yield from layer_tensors(config, shard, index).values()


def _head_rows(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
