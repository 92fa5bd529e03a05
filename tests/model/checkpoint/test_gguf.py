"""GGUF files: the header and slices against the gguf library, metadata, and refused files."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from helpers.model.tiny_gguf import make_tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VARIANTS, tiny_config, tiny_tensors

from tightwire.model.checkpoint.config import RopeScaling
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.gguf import GgufFile
from tightwire.model.checkpoint.gguf_config import config_from_gguf
from tightwire.model.checkpoint.header import Sizes, read_sizes
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.checkpoint.tensors import expected_tensors, gguf_name
from tightwire.model.open import fingerprint, open_checkpoint

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def reference(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor under its GGUF name, by the library's reader and dequantizer."""
    tensors = gguf.GGUFReader(path).tensors
    return {
        t.name: torch.from_numpy(np.array(dequantize(np.array(t.data), t.tensor_type))).view(
            *reversed(t.shape.tolist())
        )
        for t in tensors
    }


def undo(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As transformers undoes llama.cpp's order (``_reverse_permute_weights``)."""
    half = x.shape[0] // num_heads // 2
    return x.reshape(num_heads, half, 2, *x.shape[1:]).swapaxes(2, 1).reshape(x.shape)


def assert_same_header(path: Path) -> None:
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.get(key) == field.contents(), key
    assert [(t.name, t.kind, t.offset, list(t.shape)) for t in ours.tensors.values()] == [
        (t.name, t.tensor_type, t.data_offset, list(reversed(t.shape.tolist()))) for t in theirs.tensors
    ]


def test_header_equals_the_librarys(tmp_path: Path) -> None:
    assert_same_header(make_tiny_gguf(tmp_path / "m.gguf"))


@pytest.mark.slow
def test_header_of_the_embedded_model_equals_the_librarys(smollm2_path: Path) -> None:
    assert_same_header(smollm2_path)


@pytest.mark.parametrize("kind", TYPES)
def test_whole_tensors_of_each_type(tmp_path: Path, kind: str) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", kind, **WIDE)
    checkpoint, want = open_checkpoint(str(path)), reference(path)
    reader = checkpoint.reader()
    for name, shape in expected_tensors(checkpoint.config):
        expected = want[gguf_name(name) or ""]
        if ".q_proj." in name:
            expected = undo(expected, checkpoint.config.num_heads)
        if ".k_proj." in name:
            expected = undo(expected, checkpoint.config.num_kv_heads)
        assert reader.shape(name) == shape
        out = torch.empty(shape)
        reader.read_into(out, name, rows=range(len(out)))
        assert torch.equal(out, expected), name


@pytest.mark.parametrize("kind", TYPES)
def test_slices_equal_slices_of_the_whole(tmp_path: Path, kind: str) -> None:
    reader = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", kind, **WIDE))).reader()
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        full_name = f"model.layers.1.{name}.weight"
        whole = torch.empty(reader.shape(full_name))
        reader.read_into(whole, full_name, rows=range(len(whole)))
        for columns in (None, range(64), range(96, 256), range(50, 201), range(255, 256)):
            for rows in (range(64), range(64, 128), range(3, 100)):
                want = whole[rows.start : rows.stop]
                want = want if columns is None else want[:, columns.start : columns.stop]
                out = torch.empty(want.shape, dtype=torch.bfloat16)
                reader.read_into(out, full_name, rows=rows, columns=columns)
                assert torch.equal(out, want.bfloat16()), (name, rows, columns)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_metadata_gives_the_same_config_as_config_json(tmp_path: Path, variant: str) -> None:
    overrides = dict(VARIANTS[variant])
    if variant == "rope-llama3":  # a GGUF keeps the divisors only: told apart by the released models' constants
        overrides["rope_scaling"] = {**overrides["rope_scaling"], "original_max_position_embeddings": 8192}
    path = make_tiny_gguf(tmp_path / "m.gguf", **overrides)
    assert config_from_gguf(GgufFile(path)) == config_from_hf(tiny_config(**overrides))


@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"rope-llama3"}))  # refused below, trained on 64 positions
def test_float32_file_gives_back_the_weights(tmp_path: Path, variant: str) -> None:
    reader = open_checkpoint(str(make_tiny_gguf(tmp_path / "m.gguf", **VARIANTS[variant]))).reader()
    want = tiny_tensors(tiny_config(**VARIANTS[variant]))
    for name, tensor in want.items():
        out = torch.empty(tensor.shape)
        reader.read_into(out, name, rows=range(len(out)))
        assert torch.equal(out, tensor), name


def test_unknown_rope_divisors_are_refused(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", **VARIANTS["rope-llama3"])  # trained on 64 positions
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not those of Llama 3"):
        open_checkpoint(str(path))


def test_unsupported_quantization_is_named(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", "IQ2_S", **WIDE)
    with pytest.raises(ModelError, match="quantization type IQ2_S, which is not supported; supported: F32, F16"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("keep", [3, 30, 1000, 0.5, 0.999])
def test_truncated_files_are_named(tmp_path: Path, keep: float) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        open_checkpoint(str(path))


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A tiny file, its bytes and where its tensors begin."""
    path = make_tiny_gguf(tmp_path_factory.mktemp("fuzz") / "m.gguf")
    return path, path.read_bytes(), min(tensor.offset for tensor in GgufFile(path).tensors.values())


@settings(max_examples=200)
@given(place=st.floats(0, 1, exclude_max=True), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_read_or_refused_in_words(
    header: tuple[Path, bytes, int], place: float, value: bytes
) -> None:
    path, data, data_start = header
    at = int(place * data_start)
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(data[:at] + value + data[at + len(value) :])
    try:
        open_checkpoint(str(damaged))
    except ModelError as error:
        assert "damaged.gguf" in str(error) or "tensor" in str(error)


def metadata_only(path: Path, arch: str = "llama", **values: str | int) -> GgufFile:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in values.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


def test_other_architectures_and_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="architecture 'gpt2' is not supported; supported families: Llama"):
        config_from_gguf(metadata_only(path, "gpt2"))
    with pytest.raises(ModelError, match="'qwen3moe' with a mixture of experts is not supported"):
        config_from_gguf(metadata_only(path, "qwen3moe"))
    with pytest.raises(ModelError, match="with a mixture of experts"):
        config_from_gguf(metadata_only(path, llama__expert_count=8))
    with pytest.raises(ModelError, match="'plamo2' with recurrent layers is not supported"):
        config_from_gguf(metadata_only(path, "plamo2", plamo2__ssm__state_size=64))
    with pytest.raises(ModelError, match=r"attention\.head_count is missing"):  # of a dense Granite 4, which is read
        config_from_gguf(metadata_only(path, "granite", granite__ssm__state_size=128))
    with pytest.raises(ModelError, match=r"m\.gguf: states split\.count 3, and by its name it is one of 1"):
        metadata_only(path, split__count=3)
    with pytest.raises(ModelError, match=r"attention\.head_count is missing"):
        config_from_gguf(metadata_only(path))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A model in three parts, as llama.cpp's converter writes them."""
    make_tiny_gguf(tmp_path / "m.gguf", "Q8_0", part_tensors=9)
    return sorted(tmp_path.iterdir())


def test_a_split_file_is_the_same_model_by_any_part_or_its_folder(parts: list[Path], tmp_path: Path) -> None:
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    whole = open_checkpoint(str(make_tiny_gguf(tmp_path / "whole.gguf", "Q8_0")))
    (tmp_path / "whole.gguf").rename(tmp_path / "whole")
    for model in (*parts, tmp_path):
        checkpoint = open_checkpoint(str(model))
        assert (checkpoint.name, checkpoint.path, checkpoint.config) == ("m", parts[0], whole.config)
        assert fingerprint(checkpoint) == fingerprint(whole)
        assert checkpoint.tokenizer().vocab_size == whole.tokenizer().vocab_size
        assert read_sizes(str(model)) == tuple(getattr(whole.config, name) for name in Sizes._fields)


def test_missing_and_foreign_parts_are_named(parts: list[Path], tmp_path: Path) -> None:
    data = parts[1].read_bytes()
    parts[1].unlink()
    for model in (parts[0], parts[2], tmp_path):
        with pytest.raises(ModelError, match=r"1 of its 3 parts are missing: m-00002-of-00003\.gguf"):
            open_checkpoint(str(model))
    key, u16 = b"split.count", struct.pack("<I", 2)
    assert data.count(key + u16 + b"\x03\x00") == 1
    parts[1].write_bytes(data.replace(key + u16 + b"\x03\x00", key + u16 + b"\x04\x00"))
    with pytest.raises(
        ModelError, match=r"m-00002-of-00003\.gguf: states split\.count 4, and by its name it is one of 3"
    ):
        open_checkpoint(str(parts[0]))
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf: .* tensor .* stands in it twice"):
        open_checkpoint(str(parts[0]))


def test_a_rope_kind_that_is_not_supported(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", **VARIANTS["rope-linear"])
    data = path.read_bytes()
    old = struct.pack("<Q", 6) + b"linear"
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, struct.pack("<Q", 6) + b"spiral"))
    with pytest.raises(ModelError, match="rope scaling 'spiral' is not supported"):
        open_checkpoint(str(path))


def test_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"hello, this is something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_embedded_model(smollm2_path: Path) -> None:
    config = config_from_gguf(GgufFile(smollm2_path))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.mlp_size, config.vocab_size, config.max_positions, config.rope_theta) == (1536, 49152, 8192, 1e5)
    assert config.rope_scaling == RopeScaling()
    assert config.tied_embeddings
    assert config.norm_eps == 1e-5
    assert config.eos_token_ids == (2, 0)  # the file's own <|im_end|>, and <|endoftext|>
