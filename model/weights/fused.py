"""Maps a rank's fused tensors to a checkpoint's tensors, and reads them. One product serves all rows of a fused one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tightwire.kernels.spec.packed import Matrix, PackedMatrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.names import EMBEDDING, FINAL_NORM, HEAD
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Shard


@dataclass(frozen=True, slots=True)
class Fused:
    """Stacked rows of named tensors, and the columns that they have in common; None: the tensors are vectors."""

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
    """Return tensors by field of ``OuterWeights``. A head that is tied to the embedding is omitted."""
    every = range(config.hidden_size)
    tensors = {"embedding": Fused(((EMBEDDING, shard.vocab_rows),), every), "final_norm": Fused(((FINAL_NORM, every),))}
    if not config.tied_embeddings:
        tensors["head"] = Fused(((HEAD, shard.vocab_rows),), every)
    return tensors


def layer_tensors(config: LlamaConfig, shard: Shard, index: int) -> dict[str, Fused]:
    """Return tensors by field of ``LayerWeights``, with only the biases that this rank holds."""
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    every = range(config.hidden_size)
    query, kv = (
        range(heads.start * config.head_dim, heads.stop * config.head_dim)
        for heads in (shard.query_heads, shard.kv_heads)
    )
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
    """Yield all tensors that the rank with ``shard`` holds."""
    yield from outer_tensors(config, shard).values()
    for index in range(config.num_layers):
        yield from layer_tensors(config, shard, index).values()


def read_tensors(
    reader: CheckpointReader,
    tensors: Mapping[str, Fused],
    into: Mapping[str, Matrix],
    moved: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read each field of ``tensors`` into its matrix of ``into``; ``moved`` gets each part's bytes after its read."""
    for field, fused in tensors.items():
        out, start = into[field], 0
        for name, rows in fused.parts:
            stop = start + len(rows)
            part = out.rows(start, stop) if isinstance(out, PackedMatrix) else out[start:stop]
            reader.read_into(part, name, rows=rows, columns=fused.columns)
            moved(part.nbytes)
            start = stop
