"""Chooses each weight matrix's format in memory: packed in 8 or 4 bits, or plain.

A matrix's format does not depend on the split, so any number of ranks serves the same model.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tightwire.kernels.spec.packed_format import GROUP_ELEMS, PACKED_FORMATS, Q4_1, Q8_0, PackedFormat
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.names import EMBEDDING, HEAD
from tightwire.model.checkpoint.reader import CheckpointReader
from tightwire.model.layout import Layout, Shard, make_layout
from tightwire.model.weights.fused import Fused, all_tensors

QUANTIZATIONS = ("auto", "none", "int8", "int4")
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16", "random")
# Formats for quantizing floats. Embedding and head always get 8 bits, as in llama.cpp's 4-bit files.
QUANTIZED_AS = {"int8": Q8_0, "int4": Q4_1}
_TABLE_FORMAT = Q8_0


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats of packed matrices by name; all other matrices are plain."""

    packed: Mapping[str, PackedFormat] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)  # plain matrices' types in the checkpoint

    def of(self, fused: Fused) -> PackedFormat | None:
        return self.packed.get(fused.names[0])  # all parts have one format

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
    """Resolve ``--quantization`` for every matrix; raises ValueError if a matrix cannot be packed in this format.

    auto: keep the file's packed formats. none: all plain. int8, int4: quantize floats to Q8_0 or Q4_1 when they are
    read; keep matrices that the file holds packed in that many bits.
    """
    packed: dict[str, PackedFormat] = {}
    plain: dict[str, str] = {}
    for fused in all_tensors(config, make_layout(config, 1).shards[0]):
        if fused.columns is None:
            continue
        stored = {name: reader.stored_as(name) for name in fused.names}
        chosen = None if quantization == "none" else _choose(fused, sorted(set(stored.values())), quantization)
        if chosen is None:
            plain |= stored
        else:
            packed |= dict.fromkeys(fused.names, chosen)
    return WeightFormats(packed, plain)


def _choose(fused: Fused, stored: Sequence[str], quantization: str) -> PackedFormat | None:
    assert fused.columns is not None
    kept = PACKED_FORMATS.get(stored[0]) if len(stored) == 1 else None
    if quantization == "auto":
        return kept  # None also if parts differ, because one product reads one format
    asked = QUANTIZED_AS[quantization]
    made = _TABLE_FORMAT if fused.names[0] in (EMBEDDING, HEAD) else asked
    if kept is not None and kept.bits in (made.bits, asked.bits):
        return kept
    if any(name in PACKED_FORMATS for name in stored):
        raise ValueError(
            f"--quantization {quantization}: the file holds {', '.join(fused.names)} in {' and '.join(stored)}, and quantizing "
            "twice loses accuracy twice; use auto (as the file holds them), none (expanded), or an unquantized file"
        )
    if len(fused.columns) % GROUP_ELEMS:
        raise ValueError(
            f"--quantization {quantization}: rows of {fused.names[0]} have {len(fused.columns)} numbers, which are not "
            f"whole groups of {GROUP_ELEMS}; use --quantization none"
        )
    return made


def check_split(layout: Layout, config: LlamaConfig, formats: WeightFormats) -> None:
    """Raise ValueError unless the layout cuts packed rows between groups."""
    for shard in layout.shards:
        for fused in all_tensors(config, shard):
            packed, columns = formats.of(fused), fused.columns
            if packed is None or columns is None or (columns.start % GROUP_ELEMS == columns.stop % GROUP_ELEMS == 0):
                continue
            raise ValueError(
                f"cannot split {fused.names[0]} in {packed.name} over {len(layout.shards)} ranks: rank {shard.rank} would get "
                f"columns {columns.start} to {columns.stop}, and groups of {GROUP_ELEMS} numbers share a scale; use another "
                "--tp or --tp-split, or --quantization none"
            )


def weight_bytes(config: LlamaConfig, shard: Shard, formats: WeightFormats, elem_bytes: int) -> int:
    """Return the bytes of one rank's weights, norms and biases included; plain numbers take ``elem_bytes`` each."""
    total = 0
    for fused in all_tensors(config, shard):
        packed, width = formats.of(fused), 1 if fused.columns is None else len(fused.columns)
        total += fused.num_rows * (elem_bytes * width if packed is None else packed.row_bytes(width))
    return total
