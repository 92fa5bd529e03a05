"""Maps a rank's fused tensors to a checkpoint's, reads them, and chooses formats, which do not depend on the split."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from tightwire.kernels.spec.gguf_blocks import GROUP_ELEMS, PACKED_FORMATS, Q4_1, Q8_0, PackedFormat
from tightwire.kernels.spec.packed import Weight
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.checkpoint.tensors import EMBEDDING, FINAL_NORM, HEAD, NORMS
from tightwire.model.layout import Layout, Shard, make_layout, whole_shard


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
    """Return tensors by field of ``OuterWeights``. A head that is tied to the embedding beside it is omitted."""
    every, tensors = range(config.hidden_size), dict[str, Fused]()
    if embeds := config.first_layer == 0:
        tensors["embedding"] = Fused(((EMBEDDING, shard.vocab_rows),), every)
    if config.has_head:
        tensors["final_norm"] = Fused(((FINAL_NORM, every),))
    if (last := NORMS[config.norms].get("mlp_result")) is not None:
        number = config.first_layer + config.num_layers - 1
        tensors["last_update_norm"] = Fused(((f"model.layers.{number}.{last}.weight", every),))
    if config.has_head and not (config.tied_embeddings and embeds):
        tensors["head"] = Fused(((EMBEDDING if config.tied_embeddings else HEAD, shard.vocab_rows),), every)
    return tensors


def layer_tensors(config: LlamaConfig, shard: Shard, index: int) -> dict[str, Fused]:
    """Return tensors by field of ``LayerWeights``, with only the biases that this rank holds."""
    prefix = f"model.layers.{config.first_layer + index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    every, size, columns = range(config.hidden_size), config.head_dim, shard.mlp_columns
    query, kv = (range(heads.start * size, heads.stop * size) for heads in (shard.query_heads, shard.kv_heads))
    qkv = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    matrices = {
        "qkv": ({attention + name: rows for name, rows in qkv.items()}, every, config.qkv_bias),
        "attention_out": ({attention + "o_proj": every}, query, config.output_bias and shard.rank == 0),
        "gate_up": ({mlp + "gate_proj": columns, mlp + "up_proj": columns}, every, config.mlp_bias),
        "down": ({mlp + "down_proj": every}, columns, config.mlp_bias and shard.rank == 0),
    }
    tensors = {key: Fused(((f"{name}.weight", every),)) for key, name in _norms(config, index)}
    if config.qk_norm != "none":
        of_head = range(config.head_dim) if config.qk_norm == "heads" else None
        tensors["q_norm"] = Fused(((attention + "q_norm.weight", of_head or query),))
        tensors["k_norm"] = Fused(((attention + "k_norm.weight", of_head or kv),))
    for key, (parts, inputs, has_bias) in matrices.items():
        tensors[key] = Fused(tuple((name + ".weight", rows) for name, rows in parts.items()), inputs)
        if has_bias:
            tensors[key + "_bias"] = Fused(tuple((name + ".bias", rows) for name, rows in parts.items()))
    return tensors


def _norms(config: LlamaConfig, index: int) -> Iterator[tuple[str, str]]:
    """Yield the layer's norms: their fields and names. That of the last MLP's sum is an outer tensor."""
    names, number = NORMS[config.norms], config.first_layer + index
    if "mlp_result" in names and index:
        yield "attention_update_norm", f"model.layers.{number - 1}.{names['mlp_result']}"
    here = {"attention_norm": "attention_norm", "mlp_update_norm": "attention_result", "mlp_norm": "mlp_norm"}
    for name, role in here.items():
        if role in names:
            yield name, f"model.layers.{number}.{names[role]}"


def all_tensors(config: LlamaConfig, shard: Shard) -> Iterator[Fused]:
    """Yield all tensors that the rank with ``shard`` holds."""
    yield from outer_tensors(config, shard).values()
    for index in range(config.num_layers):
        yield from layer_tensors(config, shard, index).values()


def read_tensors(
    reader: CheckpointReader,
    tensors: Mapping[str, Fused],
    into: Mapping[str, Weight],
    moved: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read each field of ``tensors`` into its matrix of ``into``; ``moved`` gets each part's bytes after its read."""
    for key, fused in tensors.items():
        out, start = into[key], 0
        for name, rows in fused.parts:
            stop = start + len(rows)
            part = out[start:stop] if isinstance(out, Tensor) else out.rows(start, stop)
            reader.read_into(part, name, rows=rows, columns=fused.columns)
            moved(part.nbytes)
            start = stop


_PLAIN_TYPES = ("F64", "F32", "F16", "BF16", "random")
# Formats for quantizing floats. Embedding and head always get 8 bits, as in llama.cpp's 4-bit files.
QUANTIZED_AS = {"int8": Q8_0, "int4": Q4_1}
_TABLE_FORMAT = Q8_0


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats of packed matrices by name; all other matrices are plain."""

    packed: Mapping[str, PackedFormat] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)  # plain matrices' types in the checkpoint

    def of(self, fused: Fused) -> tuple[tuple[int, PackedFormat], ...]:
        """Return runs of rows and their formats; empty if the matrix is plain. Either all parts are packed or none is."""
        runs: list[tuple[int, PackedFormat]] = []
        for name, rows in fused.parts:
            if (packed := self.packed.get(name)) is not None:
                joined = runs.pop()[0] if runs and runs[-1][1] == packed else 0
                runs.append((joined + len(rows), packed))
        return tuple(runs)

    def num_bytes(self, fused: Fused, elem_bytes: int) -> int:
        """Return the bytes of a fused tensor in memory; plain numbers take ``elem_bytes`` each."""
        width = 1 if fused.columns is None else len(fused.columns)
        packed_bytes = sum(rows * packed.row_bytes(width) for rows, packed in self.of(fused))
        return packed_bytes or fused.num_rows * elem_bytes * width

    @property
    def column_units(self) -> tuple[int, int]:
        """The numbers that only a cut between them may part: of the attention's output projection, and of the MLP's."""
        sizes = [
            [packed.block_elems for name, packed in self.packed.items() if name.endswith(f".{end}.weight")]
            for end in ("o_proj", "down_proj")
        ]
        return max(sizes[0], default=GROUP_ELEMS), max(sizes[1], default=GROUP_ELEMS)

    @property
    def has_int8_activations(self) -> bool:
        return any(packed.int8_activations for packed in self.packed.values())

    def with_int8_activations(self) -> "WeightFormats":
        """The same formats, multiplied with activations in 8 bits."""
        return replace(self, packed={name: replace(own, int8_activations=True) for name, own in self.packed.items()})

    @property
    def name(self) -> str:
        """The formats, such as ``Q4_1+Q8_0``, most frequent first; empty if all matrices are plain."""
        return "+".join(name for name, _ in Counter(packed.name for packed in self.packed.values()).most_common())

    def describe(self, dtype: str) -> str:
        """Describe for the log the number of matrices per format, and those expanded to ``dtype`` from fewer bits."""
        found = Counter(packed.name for packed in self.packed.values())
        for stored in self.plain.values():
            found[dtype if stored in _PLAIN_TYPES else f"{dtype}, expanded from {stored}"] += 1
        if set(found) <= {dtype}:
            return f"weights and activations in {dtype}"
        matrices = "; ".join(f"{count} in {kind}" for kind, count in found.most_common())
        return f"weight matrices: {matrices}{'; activations in int8' if self.has_int8_activations else ''}"


def choose_formats(reader: CheckpointReader, config: LlamaConfig, quantization: str) -> WeightFormats:
    """Resolve ``--quantization`` for every matrix; raises ModelError if a matrix cannot be packed in this format.

    auto: keep the file's packed formats. none: all plain. int8, int4: quantize floats to Q8_0 or Q4_1 when they are
    read; keep matrices that the file holds packed in that many bits.
    """
    packed: dict[str, PackedFormat] = {}
    plain: dict[str, str] = {}
    for fused in all_tensors(config, whole_shard(config)):
        if fused.columns is None:
            continue
        stored = {name: reader.stored_as(name) for name in fused.names}
        chosen = {} if quantization == "none" else _choose(fused, stored, quantization)
        packed |= chosen
        plain |= {} if chosen else stored
    return WeightFormats(packed, plain)


def _choose(fused: Fused, stored: Mapping[str, str], quantization: str) -> dict[str, PackedFormat]:
    """Return the format of each part of a fused matrix, or none: the parts become plain numbers."""
    assert fused.columns is not None
    kept = {name: PACKED_FORMATS[kind] for name, kind in stored.items() if kind in PACKED_FORMATS}
    if quantization == "auto":
        return kept if len(kept) == len(stored) else {}  # one product reads plain numbers or packed ones
    asked = QUANTIZED_AS[quantization]
    made = _TABLE_FORMAT if fused.names[0] in (EMBEDDING, HEAD) else asked
    if len(kept) == len(stored) and all(own.bits in (made.bits, asked.bits) for own in kept.values()):
        return kept
    if kept:
        raise ModelError(
            f"--quantization {quantization}: the file holds {', '.join(fused.names)} in {' and '.join(sorted(set(stored.values())))}, "
            "and quantizing twice loses accuracy twice; use auto (as the file holds them), none (expanded), or an unquantized file"
        )
    if len(fused.columns) % GROUP_ELEMS:
        raise ModelError(
            f"--quantization {quantization}: rows of {fused.names[0]} have {len(fused.columns)} numbers, which are not "
            f"whole groups of {GROUP_ELEMS}; use --quantization none"
        )
    return dict.fromkeys(stored, made)


def split_model(
    config: LlamaConfig, formats: WeightFormats, world_size: int, shares: Sequence[float] | None = None
) -> Layout:
    """Return ``make_layout`` with columns cut between the blocks of these formats; raises ValueError if that is impossible."""
    layout = make_layout(config, world_size, shares, units=formats.column_units)
    for shard in layout.shards:
        for fused in all_tensors(config, shard):
            columns = fused.columns or range(0)
            for _, packed in formats.of(fused):
                unit = packed.block_elems
                if columns.start % unit or columns.stop % unit:
                    raise ValueError(
                        f"cannot split {fused.names[0]} in {packed.name} over {world_size} ranks: rank {shard.rank} would "
                        f"get columns {columns.start} to {columns.stop}, and blocks of {unit} numbers share a scale; use another "
                        "--tp or --tp-split, or --quantization none"
                    )
    return layout


def describe_cuts(layout: Layout, config: LlamaConfig, shares: Sequence[float] | None) -> str:
    """Say for the log what superblocks change in the split; empty if nothing."""
    freely = make_layout(config, len(layout.shards), shares)
    changed = []
    for what, part in (("query heads", "query_heads"), ("MLP columns", "mlp_columns")):
        own, other = (", ".join(str(len(getattr(shard, part))) for shard in each.shards) for each in (layout, freely))
        if own != other:
            changed.append(f"{what} {own} instead of {other}")
    return f"columns are cut between superblocks of 256 numbers: {' and '.join(changed)}" if changed else ""


def weight_bytes(config: LlamaConfig, shard: Shard, formats: WeightFormats, elem_bytes: int) -> int:
    """Return the bytes of one rank's weights, norms and biases included; plain numbers take ``elem_bytes`` each."""
    return sum(formats.num_bytes(fused, elem_bytes) for fused in all_tensors(config, shard))
