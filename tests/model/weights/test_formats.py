"""Formats of matrices: the result of each --quantization, its description and bytes, and refusals by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.model.loading import load_resident
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny, tiny_config

from tightwire.kernels.packed import dequantize
from tightwire.kernels.spec.gguf_blocks import PACKED_FORMATS, Q4_1, Q8_0
from tightwire.kernels.spec.packed import Matrix, PackedMatrix, StackedMatrix
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.checkpoint.tensors import EMBEDDING, HEAD, expected_tensors
from tightwire.model.layout import Layout, make_layout
from tightwire.model.open import Checkpoint, open_checkpoint
from tightwire.model.weights.formats import WeightFormats, choose_formats, describe_cuts, split_model, weight_bytes
from tightwire.model.weights.source import ResidentWeights

CPU = torch.device("cpu")
CONFIG = config_from_hf(tiny_config(dtype="bfloat16"))
NUM_MATRICES = 2 * 7 + 2
Q_PROJ, V_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"


@dataclass(frozen=True)
class Header:
    """A checkpoint of which only the types are known: ``stored``, but for some tensors."""

    stored: str
    others: dict[str, str] = field(default_factory=dict)

    def names(self) -> Iterator[str]:
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def stored_as(self, name: str) -> str:
        return self.others.get(name, self.stored)

    def read_into(self, out: Matrix, name: str, *, rows: range, columns: range | None = None) -> None:
        raise NotImplementedError


def matrices(config: LlamaConfig = CONFIG) -> set[str]:
    return {name for name, shape in expected_tensors(config) if len(shape) == 2}


@pytest.mark.parametrize("stored", ["F32", "BF16", "random"])
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_plain_matrices_stay_plain(stored: str, quantization: str) -> None:
    formats = choose_formats(Header(stored), CONFIG, quantization)
    assert not formats.packed and set(formats.plain) == matrices() and formats.name == ""


@pytest.mark.parametrize("stored", sorted(PACKED_FORMATS))
def test_packed_matrices_stay_packed_unless_expanded(stored: str) -> None:
    assert choose_formats(Header(stored), CONFIG, "auto").packed == dict.fromkeys(matrices(), PACKED_FORMATS[stored])
    assert not choose_formats(Header(stored), CONFIG, "none").packed


@pytest.mark.parametrize("stored", ["F16", "random"])
def test_floats_are_quantized_and_tables_get_8_bits(stored: str) -> None:
    formats = choose_formats(Header(stored), CONFIG, "int8")
    assert formats.packed == dict.fromkeys(matrices(), Q8_0)
    tables = {EMBEDDING: Q8_0, HEAD: Q8_0}
    assert choose_formats(Header(stored), CONFIG, "int4").packed == {**dict.fromkeys(matrices(), Q4_1), **tables}
    tied = choose_formats(Header(stored), replace(CONFIG, tied_embeddings=True), "int4")
    assert HEAD not in tied.packed and tied.packed[EMBEDDING] == Q8_0


def test_matrices_packed_in_as_many_bits_stay_as_they_are() -> None:
    header = Header("Q4_0", {EMBEDDING: "Q8_0", HEAD: "F16", V_PROJ: "Q4_1"})
    formats = choose_formats(header, CONFIG, "int4")
    assert formats.packed[Q_PROJ].name == "Q4_0" and formats.packed[EMBEDDING] == formats.packed[HEAD] == Q8_0
    assert formats.name == "Q4_0+Q8_0+Q4_1"


@pytest.mark.parametrize(
    ("header", "quantization", "message"),
    [
        (
            Header("Q8_0"),
            "int4",
            "--quantization int4: the file holds model.layers.0.self_attn.q_proj.weight, .* in Q8_0",
        ),
        (Header("Q4_1", {EMBEDDING: "F16"}), "int8", "--quantization int8: the file holds .* in Q4_1, .* use auto"),
        (Header("F32", {V_PROJ: "Q8_0"}), "int8", "v_proj.weight in F32 and Q8_0"),
    ],
)
def test_nothing_is_quantized_twice(header: Header, quantization: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_formats(header, CONFIG, quantization)


def test_rows_without_whole_groups_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"rows of model.embed_tokens.weight have 72 numbers, .*whole groups of 32; use"
    ):
        choose_formats(Header("F32"), replace(CONFIG, hidden_size=72), "int8")


def test_parts_keep_their_own_formats_unless_one_is_plain() -> None:
    formats = choose_formats(Header("Q4_1", {V_PROJ: "Q8_0", HEAD: "Q6_K"}), CONFIG, "auto")
    assert (formats.packed[Q_PROJ].name, formats.packed[V_PROJ].name, formats.packed[HEAD].name) == (
        "Q4_1",
        "Q8_0",
        "Q6_K",
    )
    assert formats.describe("bfloat16") == f"weight matrices: {NUM_MATRICES - 2} in Q4_1; 1 in Q6_K; 1 in Q8_0"
    formats = choose_formats(Header("Q4_1", {V_PROJ: "F16"}), CONFIG, "auto")
    assert Q_PROJ not in formats.packed and V_PROJ not in formats.packed
    assert formats.describe("bfloat16") == (
        f"weight matrices: {NUM_MATRICES - 3} in Q4_1; 2 in bfloat16, expanded from Q4_1; 1 in bfloat16"
    )


def test_the_description_of_plain_weights_is_short() -> None:
    assert choose_formats(Header("F16"), CONFIG, "auto").describe("float32") == "weights and activations in float32"
    half = choose_formats(Header("Q8_0", {EMBEDDING: "F16"}), CONFIG, "auto")
    assert half.describe("bfloat16") == f"weight matrices: {NUM_MATRICES - 1} in Q8_0; 1 in bfloat16"


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (CONFIG, 4, r"o_proj.weight in Q4_1 over 4 ranks: rank 0 would get columns 0 to 16, and blocks of 32"),
        (
            replace(CONFIG, head_dim=32, mlp_size=96),
            4,
            r"down_proj.weight in Q4_1 over 4 ranks: .* --quantization none",
        ),
    ],
)
def test_a_cut_through_a_group_is_refused_by_name(config: LlamaConfig, world_size: int, message: str) -> None:
    split_model(config, WeightFormats(), world_size)
    with pytest.raises(ValueError, match=message):
        split_model(config, choose_formats(Header("Q4_1"), config, "auto"), world_size)


SUPER = replace(CONFIG, hidden_size=1536, num_heads=12, num_kv_heads=2, head_dim=128, mlp_size=19 * 256)


def test_columns_are_cut_between_superblocks() -> None:
    """In formats with groups of 32 the split is as even as can be; superblocks move its cuts, and the log says so."""
    groups = choose_formats(Header("Q5_0"), SUPER, "auto")
    superblocks = choose_formats(Header("Q4_K"), SUPER, "auto")
    assert (groups.column_units, superblocks.column_units) == ((32, 32), (256, 256))
    for world_size, heads, columns in ((2, [6, 6], [2560, 2304]), (4, [4, 2, 4, 2], [1280, 1280, 1280, 1024])):
        layout = split_model(SUPER, superblocks, world_size)
        assert [shard.local_heads for shard in layout.shards] == heads
        assert [len(shard.mlp_columns) for shard in layout.shards] == columns
        assert "MLP columns " + ", ".join(map(str, columns)) + " instead of" in describe_cuts(layout, SUPER, None)
        assert describe_cuts(split_model(SUPER, groups, world_size), SUPER, None) == ""


@pytest.mark.parametrize(
    ("heads", "head_dim", "kv_heads", "world_size", "cut"),
    [
        (28, 128, 4, 4, [8, 6, 8, 6]),  # Qwen2.5-7B: a group of 7 heads is 3.5 superblocks
        (24, 128, 8, 8, [4, 2] * 4),  # Llama-3.2-3B: 1.5
        (12, 64, 2, 2, [8, 4]),
    ],
)
def test_superblocks_that_end_inside_groups_cost_a_kv_head_and_refuse_nothing(
    heads: int, head_dim: int, kv_heads: int, world_size: int, cut: list[int]
) -> None:
    config = replace(SUPER, hidden_size=heads * head_dim, num_heads=heads, head_dim=head_dim, num_kv_heads=kv_heads)
    layout = split_model(config, choose_formats(Header("Q4_K"), config, "auto"), world_size)
    assert [shard.local_heads for shard in layout.shards] == cut
    assert max(shard.local_kv_heads for shard in layout.shards) <= -(-kv_heads // world_size) + 1
    assert "query heads " + ", ".join(map(str, cut)) in describe_cuts(layout, config, None)


def test_more_ranks_than_superblocks_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"o_proj.weight in Q4_K over 8 ranks: .* blocks of 256 numbers share a scale"):
        split_model(SUPER, choose_formats(Header("Q4_K"), SUPER, "auto"), 8)


def load(checkpoint: Checkpoint, formats: WeightFormats, layout: Layout) -> list[ResidentWeights]:
    return [
        load_resident(checkpoint.reader(), checkpoint.config, shard, dtype=torch.float32, formats=formats)
        for shard in layout.shards
    ]


def numbers_of(weights: ResidentWeights) -> dict[str, torch.Tensor]:
    """Of layer 1 and the tables, unpacked."""
    fields = {name: getattr(weights.layer(1), name) for name in ("qkv", "attention_out", "gate_up", "down")}
    fields |= {"embedding": weights.outer.embedding, "head": weights.outer.head}
    assert all(isinstance(matrix, PackedMatrix) for matrix in fields.values())
    return {name: dequantize(matrix, torch.float32) for name, matrix in fields.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of each format, made once."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 256, "num_attention_heads": 4}
    return cache(lambda quant: make_tiny_gguf(tmp_path_factory.mktemp(quant) / "m.gguf", quant, **sizes))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("quant", sorted(PACKED_FORMATS))
def test_a_file_s_blocks_are_the_numbers_that_it_expands_to(
    quant: str, world_size: int, files: Callable[[str], Path]
) -> None:
    """Slices of every rank, query and key rows put in order."""
    checkpoint = open_checkpoint(str(files(quant)))
    formats = choose_formats(checkpoint.reader(), checkpoint.config, "auto")
    assert set(formats.packed.values()) == {PACKED_FORMATS[quant]} and not formats.plain
    layout = split_model(checkpoint.config, formats, world_size)
    kept, expanded = (load(checkpoint, each, layout) for each in (formats, WeightFormats()))
    for packed, plain in zip(kept, expanded, strict=True):
        for name, numbers in numbers_of(packed).items():
            owner = plain.outer if name in ("embedding", "head") else plain.layer(1)
            assert torch.equal(numbers, getattr(owner, name)), name


def test_parts_of_different_formats_are_stacked(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", "Q4_1", others={"attn_v": "Q8_0"})))
    formats = choose_formats(checkpoint.reader(), checkpoint.config, "auto")
    layout = split_model(checkpoint.config, formats, 1)
    (kept,), (expanded,) = load(checkpoint, formats, layout), load(checkpoint, WeightFormats(), layout)
    qkv = kept.layer(1).qkv
    assert isinstance(qkv, StackedMatrix) and [part.format.name for part in qkv.parts] == ["Q4_1", "Q8_0"]
    assert torch.equal(dequantize(qkv, torch.float32), dequantize(expanded.layer(1).qkv, torch.float32))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("model", ["safetensors", "random", "gguf"])
def test_ranks_quantize_parts_of_one_model(model: str, quantization: str, tmp_path: Path) -> None:
    if model == "random":
        folder = make_tiny(tmp_path, head_dim=32)
        name = f"random:{folder / 'config.json'}"
    else:
        made = (
            make_tiny(tmp_path, head_dim=32) if model == "safetensors" else make_tiny_gguf(tmp_path / "m.gguf", "F16")
        )
        name = str(made)
    checkpoint = open_checkpoint(name)
    formats = choose_formats(checkpoint.reader(), checkpoint.config, quantization)
    (alone,), parts = (load(checkpoint, formats, make_layout(checkpoint.config, tp)) for tp in (1, 2))
    whole, halves = numbers_of(alone), [numbers_of(part) for part in parts]
    for name, dim in (("attention_out", 1), ("down", 1), ("embedding", 0), ("head", 0)):
        assert torch.equal(torch.cat([half[name] for half in halves], dim), whole[name]), name


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_are_those_of_weight_bytes(world_size: int, quantization: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_tiny(tmp_path, attention_bias=True, mlp_bias=True)))
    config = checkpoint.config
    formats = choose_formats(checkpoint.reader(), config, quantization)
    layout = make_layout(config, world_size)
    for shard, weights in zip(layout.shards, load(checkpoint, formats, layout), strict=True):
        values = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
        values += [weights.outer.embedding, weights.outer.final_norm, weights.outer.head]
        total = sum(value.nbytes for value in values if value is not None)
        assert weight_bytes(config, shard, formats, 4) == total


def test_a_tensor_that_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_tiny(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(tmp_path))
    formats = choose_formats(checkpoint.reader(), checkpoint.config, "int8")
    with pytest.raises(
        ModelError, match=r"tensor model.layers.1.mlp.up_proj.weight cannot be quantized: Q8_0 stores scales"
    ):
        load(checkpoint, formats, make_layout(checkpoint.config, 1))
